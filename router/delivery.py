"""The way to one client: an outbox, its one writer, and how far the client lags."""

import time
from collections.abc import Awaitable, Callable

from noria.reasons import Reason, RequestError
from noria.service.limits import SLOW_READER_BYTES, SLOW_READER_SECONDS
from noria.service.outbox import Outbox, OutboxClosedError
from router.events import Event, event_bytes, merge_events


class Delivery:
    """Events for one client. A client that keeps up gets each as it comes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._outbox = Outbox[Event](merge_events, size=event_bytes, clock=clock)
        self._writing_since: float | None = None

    def put(self, event: Event) -> None:
        self._outbox.put(event)

    def close(self) -> None:
        """No more events; `pump` returns once those that wait are written."""
        self._outbox.close()

    async def pump(self, write: Callable[[Event], Awaitable[None]]) -> None:
        """Write events until `close`."""
        while True:
            try:
                events = await self._outbox.take()
            except OutboxClosedError:
                return
            for event in events:
                self._writing_since = self._clock()
                await write(event)
                self._writing_since = None

    def overdue(self) -> RequestError | None:
        """SLOW_READER if the client has left too much unread, or anything for too long."""
        if self._outbox.pending_bytes > SLOW_READER_BYTES:
            held = f"{self._outbox.pending_bytes} bytes, at most {SLOW_READER_BYTES}"
        elif (lag := self._lag_s()) > SLOW_READER_SECONDS:
            held = f"for {lag:.0f} s, at most {SLOW_READER_SECONDS:.0f}"
        else:
            return None
        return RequestError(Reason.SLOW_READER, f"the stream was left unread: {held}")

    def _lag_s(self) -> float:
        # A write that does not return is unread too, though nothing waits behind it.
        writing = 0.0 if self._writing_since is None else self._clock() - self._writing_since
        return max(writing, self._outbox.waiting_s())
