"""The API key of this user's own server: made once, readable by this user alone."""

import contextlib
import hashlib
import os
import secrets
import tempfile
from pathlib import Path

from noria.client.connection import KEY_FILE, config_dir

_PREFIX = "noria-"
_RANDOM_BYTES = 32


def key_sha256(key: str) -> str:
    """The key's SHA-256 in hex: all that a router is told of it."""
    return hashlib.sha256(key.encode("ascii")).hexdigest()


def new_key() -> str:
    """A key nobody has yet."""
    return f"{_PREFIX}{secrets.token_urlsafe(_RANDOM_BYTES)}"


def ensure_key() -> str:
    """NORIA_API_KEY, else the key in the user's config folder, made if there is none.

    Raises ValueError, naming where it stands, for an empty or damaged one.
    """
    given = os.environ.get("NORIA_API_KEY", "").strip()
    if given:
        return _checked(given, "NORIA_API_KEY holds no key that a header can carry")
    folder = config_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / KEY_FILE
    if not path.exists():
        _create(path)
    path.chmod(0o600)
    return _read(path)


def _read(path: Path) -> str:
    key = path.read_bytes().decode("ascii", "replace").strip()
    return _checked(key, f"{path} holds no key; delete it and a new one is made")


def _checked(key: str, problem: str) -> str:
    if not (key.isascii() and key.isprintable()) or len(key.split()) != 1:
        raise ValueError(problem)
    return key


def _create(path: Path) -> None:
    # A link either puts the whole file there or finds another one: two first runs share a key.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
        fresh = Path(folder) / KEY_FILE
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{new_key()}\n")
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(fresh)
