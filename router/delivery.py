"""The way to one client: an outbox, its one writer, and how far the client lags."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from noria.reasons import Reason, RequestError
from noria.service.limits import (
    SLOW_PROMPT_READER_SECONDS,
    SLOW_READER_BYTES,
    SLOW_READER_SECONDS,
)
from noria.service.outbox import Outbox, OutboxClosedError
from router.events import Event, PromptDelta, event_bytes, merge_events


@dataclass(slots=True)
class _Unread:
    """Bytes of events, and how many of them tell of the prompt's tokens."""

    all: int = 0
    of_prompt: int = 0

    def add(self, event: Event, sign: int = 1) -> None:
        weight = sign * event_bytes(event)
        self.all += weight
        self.of_prompt += weight if isinstance(event, PromptDelta) else 0


class Delivery:
    """Events for one client. A client that keeps up gets each as it comes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._outbox = Outbox[Event](merge_events, clock=clock)
        # What waits, and what was taken to be written.
        self._waiting, self._taken = _Unread(), _Unread()
        self._writing_since: float | None = None

    def put(self, event: Event) -> None:
        self._waiting.add(event)
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
            self._waiting = _Unread()
            for event in events:
                self._taken.add(event)
            for event in events:
                self._writing_since = self._clock()
                await write(event)
                self._writing_since = None
                self._taken.add(event, -1)

    def overdue(self) -> RequestError | None:
        """SLOW_READER if the client has left too much unread, or anything for too long.

        What is told of a prompt comes in one burst, whoever reads it: it is too much only for
        a client that does not go on reading.
        """
        unread = self._waiting.all + self._taken.all
        if self._write_s() <= SLOW_PROMPT_READER_SECONDS:
            unread -= self._waiting.of_prompt + self._taken.of_prompt
        if unread > SLOW_READER_BYTES:
            held = f"{unread} bytes, at most {SLOW_READER_BYTES}"
        elif (lag := max(self._write_s(), self._outbox.waiting_s())) > SLOW_READER_SECONDS:
            held = f"for {lag:.0f} s, at most {SLOW_READER_SECONDS:.0f}"
        else:
            return None
        return RequestError(Reason.SLOW_READER, f"the stream was left unread: {held}")

    def _write_s(self) -> float:
        """For how long the present write has not returned; 0 when there is none."""
        # It is unread too, though nothing may wait behind it.
        return 0.0 if self._writing_since is None else self._clock() - self._writing_since
