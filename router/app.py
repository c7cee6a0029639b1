"""A router that serves: opened, listening, and closed again."""

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable

import structlog

from noria.service.channel import connection_age
from noria.service.metrics import serving_metrics
from noria.service.server import running_server
from router import admin_servicer
from router.access import first_keys, keys_file_of
from router.assembly import Router
from router.config import RouterConfig
from router.ledger.prices import read_prices
from router.store.ledger_store import Retention
from router.store.opened import open_store

SERVICE_NAMES = ("noria.v1.ChatService", admin_servicer.SERVICE_NAME)


def random_seed() -> int:
    """A seed for a request that names none: 63 random bits."""
    return secrets.randbits(63)


@contextlib.asynccontextmanager
async def running_router(
    config: RouterConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    seed_source: Callable[[], int] = random_seed,
    log: structlog.typing.FilteringBoundLogger | None = None,
) -> AsyncIterator[Router]:
    """Serve until the block ends; calls still open then are cut off.

    Raises OSError if the address cannot be bound, KeysFormatError for an unusable keys file,
    StoreURLError for an unusable URL of Redis, TlsFileError for unusable certificates,
    PricesError for an unusable file of prices, TracingMissingError for a collector without its
    packages.
    """
    log = log or structlog.get_logger(service="router")
    keys_file = keys_file_of(config)
    keys, timeout_s = first_keys(config, keys_file), config.redis_timeout_s
    prices = read_prices(config.prices_file)
    kept = Retention(config.usage_row_days, config.usage_days)
    async with open_store(
        config.redis_url, log, keys, timeout_s=timeout_s, retention=kept
    ) as store:
        router = Router(
            config, store, keys_file, prices, clock=clock, seed_source=seed_source, log=log
        )
        async with _serving(router, config):
            yield router


@contextlib.asynccontextmanager
async def _serving(router: Router, config: RouterConfig) -> AsyncIterator[None]:
    ageing = connection_age(config.max_connection_age_s)
    async with running_server(
        router.add_services,
        SERVICE_NAMES,
        config.listen,
        options=ageing,
        guard=router.access.guard(),
        tls=router.tls,
    ) as server:
        router.address = server.address
        async with (
            router.running(server),
            serving_metrics(config.metrics_listen, router.metrics_registry) as address,
        ):
            router.metrics_address = address
            yield
