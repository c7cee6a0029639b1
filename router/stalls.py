"""Notices workers whose step does not end, and moves what has not begun there elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass

from router.registry import Registry
from router.worker_state import WorkerState


@dataclass(frozen=True, slots=True)
class StallNews:
    """A worker that stalled, or moves again; `moved` of its requests are placed anew."""

    worker_id: str
    is_stalled: bool
    step_age_s: float
    moved: int


class StallWatch:
    """Looks now and then; `dispatch` places what moved.

    A request without a first token leaves a stalled worker only if another one could take
    it: a step that is merely long would otherwise be begun again and again.
    """

    def __init__(
        self, registry: Registry, dispatch: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._dispatch = dispatch
        self._clock = clock
        self._stalled: set[WorkerState] = set()

    def check(self) -> list[StallNews]:
        """What has changed since the last look."""
        now = self._clock()
        stalled = {worker for worker in self._registry if worker.is_stalled(now)}
        changed, self._stalled = stalled ^ self._stalled, stalled
        moved = {worker: self._move(worker, stalled) for worker in stalled}
        if any(moved.values()):
            self._dispatch()
        return [
            StallNews(w.worker_id, w in stalled, w.step_age_s(now), moved.get(w, 0))
            for w in self._registry
            if w in changed or moved.get(w)
        ]

    def _move(self, worker: WorkerState, stalled: set[WorkerState]) -> int:
        others = set(self._registry.usable(worker.figures.model)) - stalled
        return worker.give_up_unstarted() if others else 0
