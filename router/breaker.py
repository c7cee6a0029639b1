"""Judges a worker by its own failures, so that one that fails requests is asked less.

A circuit breaker in the sense of Nygard's "Release It!": closed, open, and probing with one
request at a time. Clients' mistakes, refusals for want of room, cancels and deadlines say
nothing about a worker.
"""

from collections import deque
from enum import Enum, auto

WINDOW = 20
MIN_FAILURES = 5
FAILING_SHARE = 0.5
# Less would close it by chance at a worker that fails every other request.
PROBES_TO_CLOSE = 2
FIRST_REST_S = 5.0
MAX_REST_S = 60.0


class BreakerState(Enum):
    """Named as `noria.v1.BreakerState`."""

    CLOSED = auto()
    OPEN = auto()
    HALF_OPEN = auto()


class Breaker:
    """One worker's. It opens when at least five, and half, of the last twenty requests failed.

    Open, it rests, 5 s at first and twice as long each time a probe fails, 60 s at most; then
    it admits one request at a time until two in a row were served, or one failed. Requests are
    named by their submit numbers; times are the router's, in seconds.
    """

    def __init__(self) -> None:
        self._failures: deque[bool] = deque(maxlen=WINDOW)
        self._rest_s = FIRST_REST_S
        self._open_until: float | None = None
        self._probe: int | None = None
        self._served_probes = 0

    @property
    def is_open(self) -> bool:
        """Whether the worker is taken for failing, probes included."""
        return self._open_until is not None

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now >= self._open_until else BreakerState.OPEN

    def admits(self, now: float) -> bool:
        """Whether the worker may be given a request."""
        if self._open_until is None:
            return True
        return now >= self._open_until and self._probe is None

    def placed(self, number: int, now: float) -> None:
        """The worker was given a request, which is the probe if there is to be one."""
        if self._open_until is not None and self.admits(now):
            self._probe = number

    def passed(self, number: int) -> None:
        """A request ended in a way that says nothing about the worker."""
        if number == self._probe:
            self._probe = None

    def served(self, number: int) -> None:
        """A request was computed to its end."""
        if self._open_until is None:
            self._failures.append(False)
        elif number == self._probe:
            self._probe = None
            self._served_probes += 1
            if self._served_probes == PROBES_TO_CLOSE:
                self._close()

    def failed(self, number: int, now: float) -> None:
        """The worker failed a request."""
        if self._open_until is None:
            self._failures.append(True)
            failures = sum(self._failures)
            if failures >= max(MIN_FAILURES, FAILING_SHARE * len(self._failures)):
                self._open(now)
        elif number == self._probe:
            self._rest_s = min(2 * self._rest_s, MAX_REST_S)
            self._open(now)

    def _open(self, now: float) -> None:
        self._open_until, self._probe, self._served_probes = now + self._rest_s, None, 0

    def _close(self) -> None:
        self._failures.clear()
        self._rest_s, self._open_until = FIRST_REST_S, None
