"""gRPC options for both ends of every hop; they belong together and are kept together."""

import ipaddress

from noria.service.limits import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES

Options = tuple[tuple[str, int | str], ...]

KEEPALIVE_S = 10
# Long enough for a ping's answer to come behind a large message on a slow line.
KEEPALIVE_TIMEOUT_S = 10

# Both names of one limit: by the first alone the core waits a minute for a ping's answer.
_KEEPALIVE: Options = (
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
)

_SIZES: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
)

# Dead peers are noticed within KEEPALIVE_S + KEEPALIVE_TIMEOUT_S, also on idle sessions.
CLIENT_OPTIONS: Options = (
    *_SIZES,
    *_KEEPALIVE,
    ("grpc.http2.max_pings_without_data", 0),
)

# A server must allow the pings its clients send, or it answers GOAWAY (ENHANCE_YOUR_CALM).
SERVER_OPTIONS: Options = (
    *_SIZES,
    *_KEEPALIVE,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 500),
    ("grpc.so_reuseport", 0),
)

# What gRPC takes for "no limit".
_NEVER_MS = 2**31 - 1


def connection_age(seconds: float) -> Options:
    """A server's options that end its connections after about `seconds`.

    Calls under way stay on the old connection for as long as they take. New ones make the
    client ask for the service's addresses again: so it finds servers that were started
    since. gRPC varies the age by a tenth, lest all clients come back together.
    """
    return (
        ("grpc.max_connection_age_ms", round(seconds * 1000)),
        ("grpc.max_connection_age_grace_ms", _NEVER_MS),
    )


def is_loopback(target: str) -> bool:
    """Whether HOST:PORT or HOST is a loopback address, or the name that stands for one."""
    host = (target.rpartition(":")[0] or target).strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
