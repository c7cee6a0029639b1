"""Run several coroutines as one: none outlives the call."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def first_of(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all parts until one ends; the others are cancelled. Raises what it raised."""
    await _run(parts, asyncio.FIRST_COMPLETED)


async def all_of(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all parts to their end, or until one raises; the others are then cancelled."""
    await _run(parts, asyncio.FIRST_EXCEPTION)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` gives, or None if `stop` is set first; the work is then cancelled."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task, stopping)


async def _run(parts: tuple[Coroutine[Any, Any, None], ...], until: str) -> None:
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=until)
    finally:
        await _cancel(*tasks)
    for task in done:
        if not task.cancelled():
            task.result()


async def _cancel(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
