"""Threads for encoding, so that the event loop never waits for a long text."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from noria.reasons import Reason, RequestError

T = TypeVar("T")

LONG_TEXT_BYTES = 64 * 1024
MAX_LONG_BYTES = 32 * 1024 * 1024
# About what a text of a few MiB takes.
RETRY_AFTER_S = 2.0


class EncodePool:
    """Runs encodes on threads; long texts have one thread of their own, so short ones pass.

    Encoding takes hundreds of times the text's own memory: long texts are encoded one at a
    time, and no more than `max_long_bytes` of them are here. A call that is cancelled while
    it waits is never run.
    """

    def __init__(self, num_threads: int, max_long_bytes: int = MAX_LONG_BYTES) -> None:
        self._max_long_bytes = max_long_bytes
        self._long_bytes = 0
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
        """The result of `encode`, which handles this many bytes of text.

        Raises RequestError (QUEUE_FULL) for a long text that finds too many others.
        """
        loop = asyncio.get_running_loop()
        if num_bytes <= LONG_TEXT_BYTES:
            return await loop.run_in_executor(self._short, encode)
        with self._place(num_bytes):
            return await loop.run_in_executor(self._long, encode)

    @contextlib.contextmanager
    def _place(self, num_bytes: int) -> Iterator[None]:
        if self._long_bytes and self._long_bytes + num_bytes > self._max_long_bytes:
            raise RequestError(
                Reason.QUEUE_FULL,
                f"{num_bytes} bytes of text after {self._long_bytes} bytes of other long texts"
                f" that are being encoded; together at most {self._max_long_bytes}",
                retry_after_s=RETRY_AFTER_S,
            )
        self._long_bytes += num_bytes
        try:
            yield
        finally:
            self._long_bytes -= num_bytes
