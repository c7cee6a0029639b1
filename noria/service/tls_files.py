"""Certificates and private keys in files: read, checked, and read again when they change.

Problems name the flag and the file, never anything of what stands in it.
"""

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

MAX_BYTES = 4 * 1024 * 1024
_NO_PASSWORD = b""


class TlsFileError(ValueError):
    """Files that cannot be used; the message says which, and why."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of one side of a connection, in PEM.

    ca           whose signature the other side's certificate needs
    cert         this side's certificate, then those between it and its CA
    key          the private key of `cert`, not encrypted
    server_name  for a client: the name in the server's certificate; empty: the address's host
    flags        what `ca`, `cert` and `key` are called in errors
    Raises TlsFileError for a certificate without a key, or a key without a certificate.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""
    flags: tuple[str, str, str] = ("ca", "cert", "key")

    def __post_init__(self) -> None:
        _, cert, key = self.flags
        if self.cert is not None and self.key is None:
            raise TlsFileError(f"{key}: none; {cert} needs it")
        if self.key is not None and self.cert is None:
            raise TlsFileError(f"{cert}: none; {key} needs it")


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What the files held, in PEM."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


class TlsSource:
    """The material of some files. Raises TlsFileError if they cannot be used.

    `material` may be read on any thread while `poll` runs on another.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._seen: tuple[object, ...] | None = self._mark()
        self.material = read_material(files)

    def poll(self) -> bool:
        """Whether the files have changed since the last call; they are read then.

        Raises TlsFileError, once for each state in which they cannot be used; what they held
        before stays in force.
        """
        mark = self._mark()
        if mark == self._seen:
            return False
        self._seen = mark
        material = read_material(self.files)
        if self._mark() != mark:
            # Changed while they were read: they need not belong together. Look again.
            self._seen = None
            return False
        self.material = material
        return True

    def _mark(self) -> tuple[object, ...]:
        return tuple(map(_mark_of, (self.files.ca, self.files.cert, self.files.key)))


def opened(files: TlsFiles | None) -> TlsSource | None:
    """The source of these files, if there are any. Raises TlsFileError."""
    return None if files is None else TlsSource(files)


def read_material(files: TlsFiles) -> TlsMaterial:
    """What the files hold, once it is known to be usable. Raises TlsFileError."""
    ca_flag, cert_flag, key_flag = files.flags
    ca, cert = _certificates(ca_flag, files.ca), _certificates(cert_flag, files.cert)
    key = None if files.key is None else _read(key_flag, files.key)
    if files.cert is not None and files.key is not None:
        _check_pair(files.cert, files.key, cert_flag, key_flag)
    return TlsMaterial(ca, cert, key)


def _mark_of(path: Path | None) -> object:
    try:
        status = os.stat(path) if path is not None else None
    except OSError as error:
        return error.errno
    return status and (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _read(flag: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TlsFileError(f"{flag}: {path}: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise TlsFileError(f"{flag}: {path}: more than {MAX_BYTES} bytes")
    return content


def _certificates(flag: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    content = _read(flag, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode())
    except (ssl.SSLError, ValueError):
        raise TlsFileError(f"{flag}: {path}: no certificates in PEM") from None
    return content


def _check_pair(cert: Path, key: Path, cert_flag: str, key_flag: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=lambda: _NO_PASSWORD)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsFileError(f"{key_flag}: {key}: not the key of {cert_flag} {cert}") from None
        why = "no private key in PEM, or an encrypted one"
        raise TlsFileError(f"{key_flag}: {key}: {why} ({error.reason})") from None
    except OSError as error:
        raise TlsFileError(f"{key_flag}: {key}: {error.strerror}") from None
