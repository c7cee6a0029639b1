"""One pool of connections to Redis, and whether Redis can be used now.

A call takes a tenth of a second at most, and no time at all while Redis is known to be away: a
loop of its own finds out when it is back.
"""

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from noria.service.log import loop_end
from noria.service.tasks import keep_running
from router.connection import background
from router.store.base import CALL_TIMEOUT_S, PREFIX, StoreUnavailableError, StoreURLError

T = TypeVar("T")

CONNECT_TIMEOUT_S = 1.0
PROBE_INTERVAL_S = 1.0
_FIRST_DELAY_S = 0.05
_MAX_CONNECTIONS = 32
_PROBE = f"{PREFIX}probe"
_PROBE_TTL_MS = 60_000


@dataclass(frozen=True)
class Script:
    """A Lua script. What it touches it gets as KEYS, all with one {tag}."""

    text: str

    @property
    def sha1(self) -> str:
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class RedisConnection:
    """Calls to one Redis; `redis_connection` makes one."""

    def __init__(
        self, client: "Redis", timeout_s: float, log: structlog.typing.FilteringBoundLogger
    ) -> None:
        self.client = client
        self._timeout_s = timeout_s
        self.log = log
        self._up = asyncio.Event()
        self._asked = asyncio.Event()
        self._told: str | None = None
        self._cause = ""

    @property
    def available(self) -> bool:
        """Whether the last call or probe went well."""
        return self._up.is_set()

    async def wait_available(self) -> None:
        await self._up.wait()

    async def call(
        self, command: Callable[["Redis"], Awaitable[T]], timeout_s: float | None = None
    ) -> T:
        """What the command gives. Raises StoreUnavailableError, whatever went wrong.

        `timeout_s` is for one that no request waits for. A call that is cancelled or overdue
        takes its connection with it: no later one reads its reply.
        """
        if not self.available:
            raise StoreUnavailableError("the store is away")
        try:
            return await self._timed(command, timeout_s)
        except (RedisError, OSError, TimeoutError) as error:
            self._failed(error)
            raise StoreUnavailableError("the store did not answer") from None

    async def evaluate(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | int | float],
        timeout_s: float | None = None,
    ) -> Any:
        """What the script returns; a server that has forgotten it is told it again.

        Raises StoreUnavailableError.
        """

        async def run(client: "Redis") -> Any:
            given = [*keys, *map(str, args)]
            try:
                return await client.evalsha(script.sha1, len(keys), *given)
            except NoScriptError:
                return await client.eval(script.text, len(keys), *given)

        return await self.call(run, timeout_s)

    async def probe(self) -> None:
        """Find out whether Redis can be written to, and tell it where that has changed."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self.client.ping()
            # A replica or one that is full answers a ping.
            await self._timed(lambda client: client.set(_PROBE, 1, px=_PROBE_TTL_MS))
        except (RedisError, OSError, TimeoutError) as error:
            self._up.clear()
            self._tell(_kind(error))
        else:
            self._up.set()
            self._tell("")

    async def run(self) -> None:
        """Probe once a second, at once after a failed call, and more often while away."""
        delay = _FIRST_DELAY_S
        while True:
            self._asked.clear()
            await self.probe()
            delay = _FIRST_DELAY_S if self.available else min(delay * 2, PROBE_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_INTERVAL_S if self.available else delay):
                    await self._asked.wait()
            await asyncio.sleep(_FIRST_DELAY_S * random.uniform(0.1, 1.0))

    async def _timed(
        self, command: Callable[["Redis"], Awaitable[T]], timeout_s: float | None = None
    ) -> T:
        async with asyncio.timeout(timeout_s or self._timeout_s):
            return await command(self.client)

    def _failed(self, error: Exception) -> None:
        kind = _kind(error)
        if kind != self._cause:
            self._cause = kind
            self.log.warning("store_call_failed", kind=kind)
        if not _is_answer(error):
            self._up.clear()
        self._asked.set()

    def _tell(self, problem: str) -> None:
        """Log each change, a new problem included."""
        if problem == self._told:
            return
        first, self._told, self._cause = self._told is None, problem, ""
        if problem:
            self.log.error("store_down", kind=problem)
        else:
            self.log.info("store_up" if first else "store_back")


def _is_answer(error: Exception) -> bool:
    """Whether the server refused a command, as one that is read-only, and is there."""
    return isinstance(error, ResponseError)


def _kind(error: Exception) -> str:
    """The error's class, and Redis's own word for it; never its text."""
    word = str(error).partition(" ")[0]
    told = isinstance(error, ResponseError) and word.isalpha() and word.isupper()
    return f"{type(error).__name__} {word}" if told else type(error).__name__


def _client(url: str) -> "Redis":
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            timeout=None,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            decode_responses=True,
        )
        pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError):
        raise StoreURLError("redis-url: not a URL of Redis, or with an unknown option") from None
    return Redis.from_pool(pool)


@contextlib.asynccontextmanager
async def redis_connection(
    url: str,
    log: structlog.typing.FilteringBoundLogger,
    *,
    timeout_s: float = CALL_TIMEOUT_S,
) -> AsyncIterator[RedisConnection]:
    """A connection for as long as the block; Redis may be away when it begins.

    `url` is redis://, rediss:// (TLS, with `?ssl_ca_certs=FILE` and the like) or unix://, with
    user and password in it. Raises StoreURLError for another.
    """
    connection = RedisConnection(_client(url), timeout_s, log)
    await connection.probe()
    try:
        async with background([keep_running(connection.run, loop_end(log))]):
            yield connection
    finally:
        with contextlib.suppress(RedisError, OSError):
            await connection.client.aclose()
