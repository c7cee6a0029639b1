"""The services' TLS flags, the same for all of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from noria.service.tls_files import TlsFileError, TlsFiles

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(path_type=Path)
_SERVER = (
    click.option("--tls-cert", type=_FILE, help="Certificate in PEM; without it no TLS."),
    click.option("--tls-key", type=_FILE, help="Its private key in PEM."),
    click.option("--tls-client-ca", type=_FILE, help="Callers need a certificate of this CA."),
)
_CLIENT = (
    click.option("--tls-ca", type=_FILE, help="Tokenizers' and workers' CA; without it no TLS."),
    click.option("--tls-client-cert", type=_FILE, help="Shown to tokenizers and workers."),
    click.option("--tls-client-key", type=_FILE, help="Its private key in PEM."),
    click.option(
        "--tls-server-name", default="", help="In their certificates; empty: each address's host."
    ),
)


def server_tls_flags(command: F) -> F:
    """Add `--tls-cert`, `--tls-key` and `--tls-client-ca`."""
    for option in reversed(_SERVER):
        command = option(command)
    return command


def client_tls_flags(command: F) -> F:
    """Add the flags of the way to tokenizers and workers."""
    for option in reversed(_CLIENT):
        command = option(command)
    return command


def take_server_tls(flags: dict[str, Any]) -> TlsFiles | None:
    """The files that these flags name, which are taken out. Raises UsageError."""
    cert, key, ca = flags.pop("tls_cert"), flags.pop("tls_key"), flags.pop("tls_client_ca")
    if cert is None and key is None and ca is not None:
        raise click.UsageError("tls-cert: none; tls-client-ca needs it")
    return _files(ca, cert, key, "", ("tls-client-ca", "tls-cert", "tls-key"))


def take_client_tls(flags: dict[str, Any]) -> TlsFiles | None:
    """The files that these flags name, which are taken out. Raises UsageError."""
    ca, name = flags.pop("tls_ca"), flags.pop("tls_server_name")
    cert, key = flags.pop("tls_client_cert"), flags.pop("tls_client_key")
    if ca is None and (cert or key or name):
        raise click.UsageError("tls-ca: none; the other flags of this hop's TLS need it")
    return _files(ca, cert, key, name, ("tls-ca", "tls-client-cert", "tls-client-key"))


def _files(
    ca: Path | None, cert: Path | None, key: Path | None, name: str, flags: tuple[str, str, str]
) -> TlsFiles | None:
    if ca is None and cert is None and key is None:
        return None
    try:
        return TlsFiles(ca, cert, key, name, flags)
    except TlsFileError as error:
        raise click.UsageError(str(error)) from error
