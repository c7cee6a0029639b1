"""Limits in Redis, decided by one script."""

from collections.abc import Iterator, Sequence
from importlib.resources import files

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from router.limit_decision import Limit, Statement, Verdict
from router.store.base import PREFIX
from router.store.redis_connection import RedisConnection, Script

_EXCHANGE = Script(files("router.store").joinpath("limits.lua").read_text())
_FIGURES_PER_VERDICT = 4


def limits_key(tenant: str) -> str:
    """The one name of a tenant's limits."""
    return f"{PREFIX}limits:{{{tenant}}}"


class RedisLimits:
    """A `LimitStore` that all replicas share: one round trip for an exchange."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection

    @property
    def available(self) -> bool:
        return self._connection.available

    async def wait_available(self) -> None:
        await self._connection.wait_available()

    async def exchange(
        self, router: str, statements: Sequence[Statement], lease_s: float
    ) -> list[list[Verdict]]:
        calls = [_Call(router, statement, lease_s) for statement in statements]
        replies = await self._connection.call(lambda client: _run(client, calls))
        return [_verdicts(reply) for reply in replies]


class _Call:
    """The script's key and arguments for one statement."""

    def __init__(self, router: str, statement: Statement, lease_s: float) -> None:
        self.key = limits_key(statement.tenant)
        self.args: list[str | int] = [router, int(lease_s * 1000), *_figures(statement)]


async def _run(client: "Redis", calls: Sequence[_Call]) -> list[list[int]]:
    """Raises RedisError if one of them failed."""
    if len(calls) == 1:
        # The usual case costs half of a pipeline.
        return [await _run_alone(client, calls[0])]
    async with client.pipeline(transaction=False) as pipeline:
        for call in calls:
            pipeline.evalsha(_EXCHANGE.sha1, 1, call.key, *call.args)
        replies = await pipeline.execute(raise_on_error=False)
    for index, reply in enumerate(replies):
        if isinstance(reply, NoScriptError):
            # A server that was started anew; whatever ran before is not run again.
            replies[index] = await _run_alone(client, calls[index])
        elif isinstance(reply, Exception):
            raise reply
    return replies


async def _run_alone(client: "Redis", call: _Call) -> list[int]:
    try:
        reply: list[int] = await client.evalsha(_EXCHANGE.sha1, 1, call.key, *call.args)
    except NoScriptError:
        reply = await client.eval(_EXCHANGE.text, 1, call.key, *call.args)
    return reply


def _figures(statement: Statement) -> Iterator[int]:
    limits, account, known = statement.limits, statement.account, statement.known
    yield limits.requests_per_minute or 0
    yield limits.tokens_per_minute or 0
    yield limits.concurrent_requests or 0
    yield limits.concurrent_encodes or 0
    yield from (account.concurrent, account.encodes, account.requests)
    yield from (account.tokens, account.open_tokens)
    yield from (known.requests, known.tokens, known.open_tokens)
    yield from (statement.lacking_requests, statement.lacking_tokens, statement.number)
    for ask in statement.asks:
        yield from (ask.requests, ask.concurrent, ask.encodes, ask.needed, ask.wanted)
        yield int(ask.dry_run)


def _verdicts(reply: Sequence[int]) -> list[Verdict]:
    figures = reply[1:]
    return [
        Verdict(tokens, Limit(limit) if limit else None, wait_ms, left)
        for tokens, limit, wait_ms, left in (
            figures[first : first + _FIGURES_PER_VERDICT]
            for first in range(0, len(figures), _FIGURES_PER_VERDICT)
        )
    ]
