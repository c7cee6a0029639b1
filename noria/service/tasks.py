"""Run several coroutines as one: none outlives the call."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def first_of(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all parts until one ends; the others are cancelled. Raises what it raised."""
    await _run(parts, lambda task: True)


async def all_of(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all parts to their end, or until one raises or is cancelled; the others then are."""
    await _run(parts, lambda task: task.cancelled() or task.exception() is not None)


async def keep_running(
    start: Callable[[], Coroutine[Any, Any, None]],
    on_end: Callable[[BaseException | None], None],
    *,
    pause_s: float = 1.0,
    max_pause_s: float = 60.0,
) -> None:
    """Run what should never end, and start it again whenever it does.

    Before each start it pauses for `pause_s`; after one error on another twice as long each
    time, up to `max_pause_s`, unless it ran for longer than that.

    A process goes on without its other tasks' errors, and must not go on without this one.
    `on_end` hears of each end, with the error if there was one. Cancelled, it ends with what
    it runs.
    """
    loop, pause = asyncio.get_running_loop(), pause_s
    while True:
        started = loop.time()
        task = asyncio.create_task(start())
        try:
            await asyncio.wait({task})
        finally:
            await _cancel(task)
        on_end(None if task.cancelled() else task.exception())
        failed = not task.cancelled() and task.exception() is not None
        lived = loop.time() - started > max_pause_s
        pause = pause if failed and not lived else pause_s
        await asyncio.sleep(pause)
        pause = min(2 * pause, max_pause_s)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` gives, or None if `stop` is set first; the work is then cancelled."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task, stopping)


async def _run(
    parts: tuple[Coroutine[Any, Any, None], ...], is_last: Callable[["asyncio.Task[None]"], bool]
) -> None:
    tasks = [asyncio.create_task(part) for part in parts]
    done: set[asyncio.Task[None]] = set()
    pending = set(tasks)
    try:
        while pending and not any(map(is_last, done)):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel(*tasks)
    for task in done:
        if not task.cancelled():
            task.result()


async def _cancel(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
