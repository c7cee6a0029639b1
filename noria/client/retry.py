"""Which refused calls are tried again, and when.

A server that says when the same call may pass (`RetryInfo`) is taken at its word; nothing
else is ever repeated.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NoReturn, TypeVar

import grpc

from noria.client.decode import error_of_rpc
from noria.client.errors import NoriaError, RequestCancelledError
from noria.reasons import RETRY_OF, Retry

# A server that names no time, or a negative one, is still not asked in a tight loop.
MIN_PAUSE_S = 0.05
# Pauses are lengthened by up to this share, so that those refused together do not return together.
SPREAD = 0.1

Event = TypeVar("Event", bound=threading.Event | asyncio.Event)


class Attempts(Generic[Event]):
    """The attempts at one call, all under one deadline.

    `ended` is set when the call is cancelled or its client closed: no attempt follows.
    """

    def __init__(
        self,
        ended: Event,
        timeout: float,
        *,
        retry: bool,
        clock: Callable[[], float] = time.monotonic,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self.ended = ended
        self._retry = retry
        self._clock = clock
        self._spread = spread
        self._deadline = clock() + timeout

    def left(self) -> float:
        """Seconds to the deadline: the timeout of the next attempt."""
        return max(0.0, self._deadline - self._clock())

    def pause_after(self, error: NoriaError) -> float | None:
        """Seconds to wait before the next attempt; None if there is to be none."""
        if not self._retry or error.retry_after_s is None:
            return None
        if error.reason is not None and RETRY_OF[error.reason] is Retry.NO:
            return None
        pause = max(error.retry_after_s, MIN_PAUSE_S) * (1 + SPREAD * self._spread())
        return pause if pause < self.left() else None


class Calls(Generic[Event]):
    """The calls of one client. `end_all` ends their pauses; the channel ends what runs."""

    def __init__(self, new_event: Callable[[], Event], *, retry: bool) -> None:
        self._new_event = new_event
        self._retry = retry
        self._open: set[Event] = set()

    @contextmanager
    def begin(self, timeout: float) -> Iterator[Attempts[Event]]:
        """One call, whose deadline is `timeout` seconds after entering."""
        ended = self._new_event()
        self._open.add(ended)
        try:
            yield Attempts(ended, timeout, retry=self._retry)
        finally:
            self._open.discard(ended)

    def end_all(self) -> None:
        """No call that is open now is tried again."""
        for ended in tuple(self._open):
            ended.set()


def pause(attempts: Attempts[threading.Event], error: NoriaError) -> None:
    """Wait until the next attempt may start. Raises `error` if there is to be none."""
    seconds = attempts.pause_after(error)
    if seconds is None:
        raise error
    if attempts.ended.wait(seconds):
        _raise_cancelled(error.request_id)


async def pause_async(attempts: Attempts[asyncio.Event], error: NoriaError) -> None:
    """`pause` on an event loop."""
    seconds = attempts.pause_after(error)
    if seconds is None:
        raise error
    try:
        await asyncio.wait_for(attempts.ended.wait(), seconds)
    except TimeoutError:
        return
    _raise_cancelled(error.request_id)


def repeated(attempts: Attempts[threading.Event], call: Callable[[float], Any]) -> Any:
    """What `call(timeout)` returns, once it is not refused. Raises NoriaError."""
    while True:
        try:
            return call(attempts.left())
        except grpc.RpcError as error:
            failure = error_of_rpc(error)
        pause(attempts, failure)


async def repeated_async(attempts: Attempts[asyncio.Event], call: Callable[[float], Any]) -> Any:
    """`repeated` on an event loop."""
    while True:
        try:
            with errors_of_call():
                return await call(attempts.left())
        except NoriaError as error:
            failure = error
        await pause_async(attempts, failure)


@contextmanager
def errors_of_call(request_id: Callable[[], str] = str) -> Iterator[None]:
    """On an event loop: what grpc.aio raises in the block, as NoriaError."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of_rpc(error, request_id()) from None
    except asyncio.CancelledError:
        # grpc.aio raises this too when the call is cancelled or its channel closed; whoever
        # reads takes it for the end of a task, and only the task's own cancelling is that.
        if _task_is_cancelled():
            raise
        _raise_cancelled(request_id())


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _raise_cancelled(request_id: str) -> NoReturn:
    message = "cancelled by the client"
    raise RequestCancelledError(
        message, code=grpc.StatusCode.CANCELLED, request_id=request_id
    ) from None
