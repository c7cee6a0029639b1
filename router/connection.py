"""What both kinds of sessions share: one writer per stream, and coming back after a break."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import grpc

from noria.service.channel import CLIENT_OPTIONS, Options
from noria.service.outbox import Outbox, OutboxClosedError

T = TypeVar("T")

_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 1.0
_SETTLED_S = 5.0

# A fresh connection for each session: a shared one would carry its backoff over.
SESSION_OPTIONS: Options = (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


class SessionRefusedError(Exception):
    """The peer answered, and cannot be used as it is; the message says why."""


async def keep_connected(
    connect: Callable[[], Awaitable[None]], on_break: Callable[[Exception | None], None]
) -> None:
    """Run `connect` again and again; it returns or raises when its session has ended.

    `on_break` hears of each end. Delays grow from 50 ms to 1 s, with jitter, and start
    anew after a session that lasted.
    """
    loop = asyncio.get_running_loop()
    delay = _FIRST_DELAY_S
    while True:
        started = loop.time()
        try:
            await connect()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The call was cancelled, not this task.
            on_break(None)
        except Exception as error:
            on_break(error)
        else:
            on_break(None)
        if loop.time() - started > _SETTLED_S:
            delay = _FIRST_DELAY_S
        await asyncio.sleep(delay * random.uniform(0.5, 1.0))
        delay = min(delay * 2, _MAX_DELAY_S)


@contextlib.asynccontextmanager
async def writing(
    call: grpc.aio.StreamStreamCall[Any, Any],
    outbox: Outbox[T],
    to_wire: Callable[[T], Any],
) -> AsyncIterator[None]:
    """Write what the outbox holds for as long as the block lasts.

    A write that fails because the call ended is no news: whoever reads the call hears
    of it. However else the writing ends, the call ends with it: what is put into the outbox
    would wait there for ever. A failure is raised when the block is left.
    """
    async with background([_write_all(call, outbox, to_wire)]):
        yield


async def _write_all(
    call: grpc.aio.StreamStreamCall[Any, Any], outbox: Outbox[T], to_wire: Callable[[T], Any]
) -> None:
    try:
        while True:
            for item in await outbox.take():
                await call.write(to_wire(item))
    except (OutboxClosedError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    except BaseException:
        call.cancel()
        raise


@contextlib.asynccontextmanager
async def background(coroutines: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run these beside the block and stop them with it; their own failures are raised then."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
