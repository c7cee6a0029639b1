"""The API key of this user's own server: made once, readable by this user alone.

Beside it lies the keys file of the router, which holds the key's hash. More keys and
tenants may be added there by hand.
"""

import contextlib
import os
import tempfile
from pathlib import Path

from noria.client.connection import KEY_FILE, config_dir
from noria.service.api_key import key_sha256, new_key

KEYS_FILE = "keys.toml"
_KEYS_TOML = """\
# Who may call: read again whenever it changes. Keys stand here as SHA-256 in hex alone.
[[tenants]]
name = "default"
admin = true

[[tenants.keys]]
sha256 = "{digest}"
label = "made by noria up"
"""


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
    _ensure(path, f"{new_key()}\n")
    return _read(path)


def ensure_keys_file(key: str) -> Path | None:
    """The router's file with this key's hash, made if there is none; None for NORIA_API_KEY,
    which is written nowhere.

    Raises ValueError for a file that does not hold it.
    """
    if os.environ.get("NORIA_API_KEY", "").strip():
        return None
    path = config_dir() / KEYS_FILE
    digest = key_sha256(key)
    _ensure(path, _KEYS_TOML.format(digest=digest))
    if digest not in path.read_text("utf-8", "replace").lower():
        raise ValueError(
            f"{path} lacks the hash of the key in {KEY_FILE}; delete it and a new one is made"
        )
    return path


def _read(path: Path) -> str:
    key = path.read_bytes().decode("ascii", "replace").strip()
    return _checked(key, f"{path} holds no key; delete it and a new one is made")


def _checked(key: str, problem: str) -> str:
    if not (key.isascii() and key.isprintable()) or len(key.split()) != 1:
        raise ValueError(problem)
    return key


def _ensure(path: Path, content: str) -> None:
    if not path.exists():
        _create(path, content)
    path.chmod(0o600)


def _create(path: Path, content: str) -> None:
    # A link either puts the whole file there or finds another one: two first runs share a key.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
        fresh = Path(folder) / path.name
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(content)
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(fresh)
