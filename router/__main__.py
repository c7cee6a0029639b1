"""`python -m router`: flags and environment (NORIA_ROUTER_...) into a running router."""

import asyncio
from pathlib import Path
from typing import Any

import click
import structlog

from noria.service.channel import is_loopback
from noria.service.limits import DEFAULT_DEADLINE_S
from noria.service.log import LEVELS, configure_logging
from noria.service.parent import die_with_parent
from noria.service.server import stop_event
from noria.service.tls_files import TlsFileError
from noria.service.tls_flags import (
    client_tls_flags,
    server_tls_flags,
    take_client_tls,
    take_server_tls,
)
from router.app import running_router
from router.assembly import Router
from router.config import RouterConfig
from router.keys_format import KeysFormatError
from router.ledger.prices import PricesError
from router.ledger.sweeper import LEASE_S
from router.store.base import CALL_TIMEOUT_S, StoreURLError
from router.store.ledger_store import KEPT
from router.tracing import TracingMissingError


@click.command(context_settings={"auto_envvar_prefix": "NORIA_ROUTER", "show_default": True})
@click.option("--listen", default="127.0.0.1:50051", help="host:port; port 0 picks one.")
@click.option("--metrics-listen", default="", help="host:port for /metrics; empty: none.")
@click.option(
    "--tokenizer",
    "tokenizers",
    multiple=True,
    envvar="NORIA_ROUTER_TOKENIZER",
    help="host:port of a tokenizer service; repeatable, in the environment separated by spaces.",
)
@click.option(
    "--worker",
    "workers",
    multiple=True,
    envvar="NORIA_ROUTER_WORKER",
    help="host:port of a worker, or dns:///host:port of several; repeatable, in the environment"
    " separated by spaces. With --redis-url those that register there come besides.",
)
@click.option("--keys-file", type=click.Path(path_type=Path), help="Keys and tenants, see below.")
@click.option("--api-key-sha256", default="", help="Or one key alone: its SHA-256 in hex.")
@click.option(
    "--redis-url",
    default="",
    help="What routers share; it may hold a password: use the environment.",
)
@click.option("--redis-timeout-s", default=CALL_TIMEOUT_S, help="Of one call to it.")
@click.option(
    "--keys-max-age-s", default=3600.0, help="Keys of a Redis that went away hold so long."
)
@click.option("--lease-s", default=LEASE_S, help="Silent for so long, a router is gone to others.")
@click.option("--prices-file", type=click.Path(path_type=Path), help="Of tokens, see below.")
@click.option("--usage-row-days", default=KEPT.row_days, help="Keep what each request used.")
@click.option("--usage-days", default=KEPT.total_days, help="Keep what each day's requests used.")
@click.option("--cache-secret", default="", help="Salts cached prefixes; empty: a random one.")
@click.option("--max-queued-requests", default=1024, help="A full queue refuses at once.")
@click.option("--max-queued-tokens", default=4_000_000, help="Prompt tokens in the queue.")
@click.option("--default-deadline-s", default=DEFAULT_DEADLINE_S, help="Of a call without one.")
@click.option("--drain-grace-s", default=60.0, help="For streams to finish after SIGTERM.")
@click.option("--max-connection-age-s", default=300.0, help="Then a client looks for routers anew.")
@click.option("--otlp-endpoint", default="", help="Collector for spans, http://HOST:4318.")
@click.option("--otlp-sample-ratio", default=1.0, help="Of traces that begin here.")
@server_tls_flags
@client_tls_flags
@click.option("--log-level", type=click.Choice(LEVELS), default="info", help="The least told.")
@click.option("--parent-pid", type=int, help="End when this process ends.")
def main(parent_pid: int | None, log_level: str, **options: Any) -> None:
    """Serve the chat API to clients."""
    log = configure_logging("router", log_level)
    try:
        tls, peer_tls = take_server_tls(options), take_client_tls(options)
        config = RouterConfig(tls=tls, peer_tls=peer_tls, **options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if parent_pid is not None:
        die_with_parent(parent_pid)
    try:
        asyncio.run(_serve(config, log))
    except KeysFormatError as error:
        raise click.ClickException(f"keys-file: {error}") from error
    except PricesError as error:
        raise click.ClickException(f"prices-file: {error}") from error
    except (StoreURLError, TlsFileError, TracingMissingError) as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(str(error)) from error


async def _serve(config: RouterConfig, log: structlog.typing.FilteringBoundLogger) -> None:
    stop = stop_event()
    async with running_router(config, log=log) as router:
        log.info("listening", address=router.address, metrics=router.metrics_address)
        if config.tls is None and not is_loopback(config.listen):
            log.warning("keys_travel_unencrypted", listen=config.listen, why="no tls-cert")
        ready = asyncio.create_task(_tell_ready(router, log))
        await stop.wait()
        ready.cancel()
        log.info("draining")
        await router.drain(config.drain_grace_s)
    log.info("stopped")


async def _tell_ready(router: Router, log: structlog.typing.FilteringBoundLogger) -> None:
    await router.wait_ready()
    log.info("ready")


if __name__ == "__main__":
    main()
