"""Threads for encoding, so that the event loop never waits for a long text."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")

LONG_TEXT_BYTES = 64 * 1024


class EncodePool:
    """Runs encodes on threads; long texts have one thread of their own, so short ones pass.

    A call that is cancelled while it waits is never run.
    """

    def __init__(self, num_threads: int) -> None:
        self._short = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="encode-long")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for executor in (self._short, self._long):
            executor.shutdown(wait=False, cancel_futures=True)

    async def run(self, num_bytes: int, encode: Callable[[], T]) -> T:
        """The result of `encode`, which handles this many bytes of text."""
        executor = self._short if num_bytes <= LONG_TEXT_BYTES else self._long
        return await asyncio.get_running_loop().run_in_executor(executor, encode)
