"""`python -m router.first_key`: make the first administrator's key, in Redis, and print it.

Who may do this is who may write to that Redis: the operator. Every later key is made with a
key that there is, through a router.
"""

import asyncio

import click
import structlog

from noria.service.api_key import key_sha256, new_key
from noria.service.log import configure_logging
from router.auth import Tenant
from router.store.base import StoreUnavailableError, StoreURLError
from router.store.keys import NewKey
from router.store.opened import open_store

ADMIN = "admin"
_PATIENCE_S = 5.0


async def make_first_key(redis_url: str, log: structlog.typing.FilteringBoundLogger) -> str | None:
    """A new key of the tenant `admin`; None if a tenant with the scope `admin` has a live one.

    Of any number that run at the same time one makes a key. Raises StoreUnavailableError,
    StoreURLError.
    """
    api_key = new_key()
    async with open_store(redis_url, log, timeout_s=_PATIENCE_S) as store:
        made = await store.keys.create_first(
            Tenant(ADMIN, admin=True), NewKey(ADMIN, key_sha256(api_key), "made by init")
        )
    if made is None:
        return None
    _, change = made
    log.info("key_changed", by="", action="init", tenant=ADMIN, key_id=change.key_id)
    return api_key


@click.command(context_settings={"auto_envvar_prefix": "NORIA_ROUTER"})
@click.option("--redis-url", required=True, help="The routers' own.")
def main(redis_url: str) -> None:
    """Print the first administrator's key; it is told this once."""
    log = configure_logging("first_key")
    try:
        api_key = asyncio.run(make_first_key(redis_url, log))
    except StoreURLError as error:
        raise click.UsageError(str(error)) from error
    except StoreUnavailableError:
        raise click.ClickException("Redis does not answer, or takes no writes") from None
    if api_key is None:
        raise click.ClickException("there is an administrator with a live key: use that one")
    click.echo(api_key)


if __name__ == "__main__":
    main()
