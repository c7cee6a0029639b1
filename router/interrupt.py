"""Ends a block of a task with an error, from outside of the task.

Works like `asyncio.timeout`: the task is cancelled, and the cancellation leaves the
block as the error. A write that a slow client blocks ends as well, and everything the
block holds comes back on the one way out.
"""

import asyncio
from types import TracebackType

from noria.reasons import RequestError


class Interrupt:
    """A context manager around the block; `set` may be called at any time by anyone."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._error: RequestError | None = None
        self._cancelled = False

    def __enter__(self) -> "Interrupt":
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task else 0
        return self

    def set(self, error: RequestError) -> None:
        """Leave the block with `error`; the first one counts, and none after the block."""
        if self._task is None or self._error is not None:
            return
        self._error = error
        if asyncio.current_task() is self._task:
            # A task that cancels itself would carry the cancellation out of the block if
            # the block ended without waiting: let it take effect where the task waits.
            asyncio.get_running_loop().call_soon(self._cancel)
        else:
            self._cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if self._error is None or task is None:
            return
        others = task.uncancel() - self._cancelling if self._cancelled else 0
        if kind is None or (kind is asyncio.CancelledError and others <= 0):
            raise self._error from error

    def _cancel(self) -> None:
        if self._task is not None:
            self._cancelled = True
            self._task.cancel()
