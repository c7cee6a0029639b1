"""Steps between the moment they are launched and the moment their results are there."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from worker.scores import StepResult
from worker.sequence import SchedulerOutput


class DeviceLostError(RuntimeError):
    """The device is out of memory or in an undefined state: nothing can be computed any more.

    The message says which, and nothing of requests.
    """


class Computing(Protocol):
    """A step that is being computed, or is computed already."""

    def collect(self) -> StepResult:
        """Wait for what it brings. Raises whatever went wrong with it."""
        ...


class Runner(Protocol):
    """Computes scheduled steps: what draws and scorings ask for.

    Steps are launched and collected in order; a pending token is one of the step launched
    before. A sequence that the result lacks had no numbers for logits, and fails alone.
    """

    def launch(self, output: SchedulerOutput) -> Computing: ...


@dataclass(frozen=True, slots=True)
class Landed:
    """A step that was computed between two readings of the clock, or its `failure`."""

    output: SchedulerOutput
    result: StepResult
    began: float
    ended: float
    failure: Exception | None = None

    @property
    def step_s(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class _Flight:
    output: SchedulerOutput
    launched: float
    computing: Computing | None
    failure: Exception | None


class Flights:
    """Up to `ahead` steps stay in flight while another is launched: 0 is one after the other.

    A step's time runs from its launch, or from the landing of the one before if that is
    later. Raises DeviceLostError; any other error is its step's alone.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float], *, ahead: int = 0) -> None:
        self._runner = runner
        self._clock = clock
        self._ahead = ahead
        self._flights: deque[_Flight] = deque()
        self._last_landing = 0.0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def is_full(self) -> bool:
        """Whether one has to land before the next is launched."""
        return len(self._flights) > self._ahead

    @property
    def has_failed(self) -> bool:
        """Whether the last one could not even be launched: nothing can build on it."""
        return bool(self._flights) and self._flights[-1].failure is not None

    def launch(self, output: SchedulerOutput) -> None:
        launched = self._clock()
        computing: Computing | None = None
        failure: Exception | None = None
        try:
            computing = self._runner.launch(output)
        except DeviceLostError:
            raise
        except Exception as error:
            failure = error
        self._flights.append(_Flight(output, launched, computing, failure))

    def land(self) -> Landed:
        """Wait for the earliest. Raises IndexError if there is none."""
        flight = self._flights.popleft()
        result, failure = StepResult(), flight.failure
        if flight.computing is not None:
            try:
                result = flight.computing.collect()
            except DeviceLostError:
                raise
            except Exception as error:
                failure = error
        began = max(flight.launched, self._last_landing)
        self._last_landing = self._clock()
        return Landed(flight.output, result, began, self._last_landing, failure)
