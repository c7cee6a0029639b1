"""Whether a worker still moves: how old its present step is, against how long steps take.

A worker that holds work and ends no step for `max(5 s, 20 x the median step)` is stalled:
its process may be stopped, its device may hang. It may come back, too. So a stall only
keeps new work away and lets unstarted work move; the session's keepalive ends what is dead.
"""

from collections import deque
from statistics import median

STALL_MIN_S = 5.0
STALL_MEDIANS = 20
_SAMPLES = 64


class StepPace:
    """Times are seconds on the router's clock, when a report came."""

    def __init__(self, stall_min_s: float = STALL_MIN_S) -> None:
        self._min_s = stall_min_s
        self._durations: deque[float] = deque(maxlen=_SAMPLES)
        # The age from which a step is a stall; asked for far more often than it changes.
        self.stall_after_s = stall_min_s
        # The median step; None until a step of a batch has ended.
        self.usual_s: float | None = None
        self._step_count = 0
        self._was_busy = False
        self._moved_at = 0.0
        self._reported_at = 0.0
        self._reported_age = 0.0

    def begin(self, now: float) -> None:
        """A worker that held nothing of this router's is given work."""
        self._moved_at = now

    def report(self, now: float, step_count: int, step_age_s: float, *, is_busy: bool) -> None:
        """What a worker says: steps done so far, and for how long the present one has run."""
        steps = step_count - self._step_count
        if steps:
            # Busy at both ends: else the time may be that of one step and idleness after it.
            if steps > 0 and self._was_busy and is_busy:
                self._durations.append((now - self._moved_at) / steps)
                self.usual_s = median(self._durations)
                self.stall_after_s = max(self._min_s, STALL_MEDIANS * self.usual_s)
            self._moved_at = now
        self._step_count, self._was_busy = step_count, is_busy
        self._reported_at, self._reported_age = now, step_age_s

    def step_age_s(self, now: float, *, holds_work: bool) -> float:
        """For how long no step has ended although there is work; 0 for an idle worker.

        Silence counts: a worker that reports no more is taken to be in the same step.
        """
        age = now - self._moved_at if holds_work else 0.0
        if self._reported_age > 0:
            age = max(age, now - self._reported_at + self._reported_age)
        return age
