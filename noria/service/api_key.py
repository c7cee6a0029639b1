"""API keys: how one is made, and all that a service keeps of it."""

import hashlib
import secrets

_PREFIX = "noria-"
# 256 bits: a hash that is fast to compute is safe for what nobody can guess.
_RANDOM_BYTES = 32


def new_key() -> str:
    """A key nobody has yet."""
    return f"{_PREFIX}{secrets.token_urlsafe(_RANDOM_BYTES)}"


def key_sha256(key: str) -> str:
    """The key's SHA-256 in hex: all that a router is told of it."""
    return hashlib.sha256(key.encode("ascii")).hexdigest()
