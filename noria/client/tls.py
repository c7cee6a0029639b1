"""How a client's connection is encrypted, and with which certificate it shows itself."""

from dataclasses import dataclass
from pathlib import Path

from noria.service.tls_files import TlsFileError, TlsFiles, TlsSource


@dataclass(frozen=True, slots=True)
class Tls:
    """An encrypted connection; all files are PEM.

    ca           whose signature the server's certificate needs; None: the public CAs that gRPC
                 brings along
    cert, key    the client's own certificate and private key, where the server asks for one
    server_name  the name in the server's certificate; empty: the address's host
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None
    server_name: str = ""


def opened_tls(tls: Tls | None) -> TlsSource | None:
    """The files as they are now. Raises ValueError, naming the one that cannot be used."""
    if tls is None:
        return None
    ca, cert, key = (None if file is None else Path(file) for file in (tls.ca, tls.cert, tls.key))
    flags = ("tls.ca", "tls.cert", "tls.key")
    try:
        return TlsSource(TlsFiles(ca, cert, key, tls.server_name, flags))
    except TlsFileError as error:
        raise ValueError(str(error)) from None
