"""Where one request's time went, in disjoint phases that add up to the whole.

They do so by construction: a cursor stands in exactly one phase, and moving it books the
time since its last move. Durations that another service reports are placed inside a stretch
measured here; each gets at most what those before it left, and the rest is transport. So
whatever is reported, no phase is negative and the sum is the router's own measurement.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto


class Phase(Enum):
    """The stretches of a request's life, named as `noria.v1.PhaseKind`, in their usual order."""

    ADMISSION = auto()
    ENCODE = auto()
    QUEUE = auto()
    BATCH_WAIT = auto()
    PREFILL = auto()
    DECODE = auto()
    DETOKENIZE = auto()
    DELIVERY = auto()
    TRANSPORT = auto()


# Durations in microseconds, in the order in which they happened.
Reported = Sequence[tuple[Phase, int]]


class Timeline:
    """The cursor of one request; `clock` counts seconds and never runs backwards.

    All durations are whole microseconds, so that sums are exact.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._phase = Phase.ADMISSION
        self._booked: dict[Phase, int] = {}
        self._begun_us = self._mark_us = _us(clock())
        self._closed = False

    @property
    def phase(self) -> Phase:
        return self._phase

    def enter(self, phase: Phase, reported: Reported = ()) -> int:
        """Stand in `phase` from now on; the length of the stretch that this ends.

        The stretch belongs to the phase left, or, if durations were reported for it, to
        these and to transport.
        """
        stretch_us = self._stretch_us()
        self._mark_us += stretch_us
        self._book(self._phase, stretch_us, reported)
        self._phase = phase
        self._closed = False
        return stretch_us

    def divide(self, phase: Phase, stretch_us: int, reported: Reported) -> None:
        """Place durations inside stretches that `phase` was given whole, once they are known."""
        divided_us = min(stretch_us, self._booked.get(phase, 0))
        self._booked[phase] = self._booked.get(phase, 0) - divided_us
        self._book(phase, divided_us, reported)

    def close(self) -> None:
        """The end; what passes from here on is nobody's, unless it is entered or closed again."""
        self.enter(self._phase)
        self._closed = True

    def elapsed_us(self) -> int:
        """From the beginning until now."""
        return self._mark_us - self._begun_us + (0 if self._closed else self._stretch_us())

    def read(self) -> tuple[int, list[tuple[Phase, int]]]:
        """The total and the phases that took any time, until now or the end."""
        booked = dict(self._booked)
        if not self._closed:
            booked[self._phase] = booked.get(self._phase, 0) + self._stretch_us()
        phases = [(phase, booked[phase]) for phase in Phase if booked.get(phase)]
        return sum(us for _, us in phases), phases

    def _stretch_us(self) -> int:
        return max(0, _us(self._clock()) - self._mark_us)

    def _book(self, phase: Phase, stretch_us: int, reported: Iterable[tuple[Phase, int]]) -> None:
        left_us, rest = stretch_us, phase
        for inside, us in reported:
            part_us = min(max(0, us), left_us)
            self._add(inside, part_us)
            left_us, rest = left_us - part_us, Phase.TRANSPORT
        self._add(rest, left_us)

    def _add(self, phase: Phase, us: int) -> None:
        self._booked[phase] = self._booked.get(phase, 0) + us


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
