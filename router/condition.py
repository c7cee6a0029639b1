"""Whether a worker is given requests, and why not, in one word."""

from enum import Enum, auto

from router.registry import Registry
from router.worker_state import WorkerState


class Condition(Enum):
    """Named as `noria.v1.WorkerState`, without the one that is not connected."""

    READY = auto()
    DRAINING = auto()
    STALLED = auto()
    FAILING = auto()
    SILENT = auto()
    MISMATCHED = auto()


def condition_of(worker: WorkerState, registry: Registry, now: float) -> Condition:
    """The first that holds of what keeps requests away, gravest first."""
    load = worker.known_load(now)
    if not registry.understands(worker):
        return Condition.MISMATCHED
    if load is None:
        return Condition.SILENT
    if load.draining:
        return Condition.DRAINING
    if worker.is_stalled(now):
        return Condition.STALLED
    return Condition.FAILING if worker.breaker.is_open else Condition.READY
