"""The router's configuration: one frozen object, filled by flags, environment or tests."""

import string
from dataclasses import dataclass, field
from pathlib import Path

from noria.service.limits import DEFAULT_DEADLINE_S
from noria.service.tls_files import TlsFiles
from router.discovery import DNS_SCHEME, split_name
from router.ledger.sweeper import LEASE_S
from router.ledger.writer import MAX_ROWS
from router.step_pace import STALL_MIN_S
from router.store.base import CALL_TIMEOUT_S
from router.store.ledger_store import KEPT
from router.worker_state import LOAD_TTL_S

_COUNTS = (
    "max_queued_requests", "max_queued_tokens", "ledger_max_rows", "usage_row_days", "usage_days",
)  # fmt: skip
_SECONDS = (
    "default_deadline_s", "redis_timeout_s", "keys_max_age_s", "lease_s", "load_ttl_s",
    "stall_min_s", "max_connection_age_s",
)  # fmt: skip
# A week: gRPC counts milliseconds in 32 bits, which is not four times as much.
MAX_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How one router runs. Addresses are host:port; port 0 in `listen` takes a free one.

    Who may call stands in `keys_file`, looked at again every `keys_poll_s` seconds, or is
    whoever holds the one key whose SHA-256 in hex is `api_key_sha256` (tenant "default").
    `redis_url` names what routers share; empty: this one is alone. Keys are there too unless a
    file or digest is given; while it is away they are known for `keys_max_age_s`. A call to it
    takes `redis_timeout_s` at most. A router that lets its lease of `lease_s` run out is gone.
    `prices_file` says what tokens cost. Of requests `ledger_max_rows` wait for the store at most;
    their rows are kept for `usage_row_days`, the sums of each day for `usage_days`.
    `workers` are host:port, or dns:///host:port for all that a name stands for; with a Redis
    those with a lease there come besides.
    `metrics_listen` is host:port for /metrics; empty: none.
    `cache_secret` salts the tenants' cached prefixes; empty: a new one at each start.
    A lone tokenizer has every model; of several each has the model of its own name.
    `tokenizer_patience_s` is how long requests wait for a tokenizer that went away,
    `worker_patience_s` how long queued ones wait for a model's last worker.
    A worker's load counts for `load_ttl_s`; a step is a stall from `stall_min_s` on at the
    earliest. A client's connection is renewed after `max_connection_age_s`, its streams stay.
    Spans of sampled requests go to the collector at `otlp_endpoint` (empty: nowhere); of those
    whose caller says nothing of sampling, `otlp_sample_ratio` are sampled.
    `tls` is for clients, `peer_tls` for the way to tokenizers and workers; None: no TLS.
    Raises ValueError for a value out of range.
    """

    tokenizers: tuple[str, ...]
    workers: tuple[str, ...]
    api_key_sha256: str = ""
    keys_file: Path | None = None
    keys_poll_s: float = 1.0
    redis_url: str = field(default="", repr=False)
    redis_timeout_s: float = CALL_TIMEOUT_S
    keys_max_age_s: float = 3600.0
    lease_s: float = LEASE_S
    prices_file: Path | None = None
    ledger_max_rows: int = MAX_ROWS
    usage_row_days: int = KEPT.row_days
    usage_days: int = KEPT.total_days
    listen: str = "127.0.0.1:50051"
    metrics_listen: str = ""
    cache_secret: str = field(default="", repr=False)
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    default_deadline_s: float = DEFAULT_DEADLINE_S
    drain_grace_s: float = 60.0
    tokenizer_patience_s: float = 10.0
    worker_patience_s: float = 10.0
    tick_s: float = 1.0
    load_ttl_s: float = LOAD_TTL_S
    stall_min_s: float = STALL_MIN_S
    max_connection_age_s: float = 300.0
    otlp_endpoint: str = ""
    otlp_sample_ratio: float = 1.0
    tls: TlsFiles | None = None
    peer_tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.otlp_sample_ratio <= 1:
            raise ValueError(f"otlp-sample-ratio: {self.otlp_sample_ratio}; from 0 to 1")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError("otlp-endpoint: http://HOST:PORT or https://HOST:PORT is needed")
        self._check_keys()
        self._check_names()
        for flag, addresses in (("tokenizer", self.tokenizers), ("worker", self.workers)):
            if not addresses and not (flag == "worker" and self.redis_url):
                raise ValueError(f"{flag}: 0 addresses; at least 1")
            if len(set(addresses)) != len(addresses):
                raise ValueError(f"{flag}: the same address twice")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', '-')}: {getattr(self, name)}; at least 1")
        for name in _SECONDS:
            seconds = getattr(self, name)
            if not 0 < seconds <= MAX_SECONDS:
                flag = name.replace("_", "-")
                raise ValueError(f"{flag}: {seconds}; above 0, at most {MAX_SECONDS}")

    def _check_names(self) -> None:
        for worker in self.workers:
            if worker.startswith(DNS_SCHEME):
                try:
                    split_name(worker.removeprefix(DNS_SCHEME))
                except ValueError as error:
                    raise ValueError(f"worker: {error}") from None

    def _check_keys(self) -> None:
        digest = self.api_key_sha256
        if self.keys_file is not None:
            if digest:
                raise ValueError("api-key-sha256: not together with keys-file")
        elif not digest and not self.redis_url:
            raise ValueError("keys-file: none; it, api-key-sha256 or redis-url is needed")
        elif digest and (len(digest) != 64 or not set(digest) <= set(string.hexdigits)):
            raise ValueError(f"api-key-sha256: {len(digest)} characters; 64 hex digits are needed")
