"""Where a client connects to, and as whom."""

import json
import os
import warnings
from pathlib import Path

import click

from noria.service.channel import CLIENT_OPTIONS, Options, is_loopback

KEY_FILE = "api-key"
_SCHEMES = ("dns:///", "dns:", "ipv4:", "ipv6:")
# Calls go in turn to every address that a name stands for: routers share the load, and when
# one stops, the others take over.
_SERVICE_CONFIG = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})


def config_dir() -> Path:
    """The user's config folder of Noria: NORIA_CONFIG_DIR, else the platform's own."""
    return Path(os.environ.get("NORIA_CONFIG_DIR") or click.get_app_dir("noria"))


def find_api_key(given: str | None, address: str) -> str | None:
    """The key: as given, else NORIA_API_KEY, else the file that `noria up` writes.

    The file's key, which nobody chose to send anywhere, goes to this computer alone. A blank
    key counts as none.
    """
    key = (given or "").strip() or os.environ.get("NORIA_API_KEY", "").strip()
    if key or not _is_this_computer(address):
        return key or None
    try:
        return (config_dir() / KEY_FILE).read_text("ascii").strip() or None
    except (FileNotFoundError, PermissionError):
        return None


def key_metadata(key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata that carries the key. Raises ValueError for one no header can carry."""
    if key is None:
        return ()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError("api_key: only printable ASCII without spaces can be sent")
    return (("authorization", f"Bearer {key}"),)


def checked_address(address: str) -> str:
    """A gRPC target: host:port, dns:///host:port, ipv4:host:port,host:port. Raises ValueError."""
    port = address.rpartition(":")[2]
    if "://" not in address and not address.startswith("unix:") and not port.isdecimal():
        raise ValueError(f"address: host:port or dns:///host:port is needed, got {address!r}")
    return address


def channel_options(address: str) -> Options:
    """Options of a channel to `address`; a proxy is never asked for this computer itself."""
    options = (*CLIENT_OPTIONS, ("grpc.service_config", _SERVICE_CONFIG))
    if _is_this_computer(address):
        return (*options, ("grpc.enable_http_proxy", 0))
    return options


class UnencryptedKeyWarning(UserWarning):
    """A key travels where others may read it: without TLS, to another computer."""


def warn_if_unencrypted(address: str, key: str | None, *, has_tls: bool) -> None:
    """Warn, on behalf of whoever makes a client, of a key that travels unencrypted."""
    if key is not None and not has_tls and not _is_this_computer(address):
        problem = "the API key travels unencrypted to another computer; TLS would hide it"
        warnings.warn(problem, UnencryptedKeyWarning, stacklevel=3)


def _is_this_computer(address: str) -> bool:
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    scheme = next((scheme for scheme in _SCHEMES if address.startswith(scheme)), "")
    return all(is_loopback(target) for target in address.removeprefix(scheme).split(","))
