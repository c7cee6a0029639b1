"""What a turn of the engine gives out: accounts, endings, refusals, load. Times in seconds."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.levels import Level
from worker.scheduled import SequenceUpdate
from worker.sequence import SchedulerOutput
from worker.sequence import Sequence as LiveSequence


@dataclass(slots=True)
class Account:
    """What one sequence has cost; times are seconds on the engine's clock.

    `device_us` is its share of the time of all steps that it was in, in microseconds.
    """

    arrived: float
    first_step: float | None = None
    first_token: float | None = None
    ended: float = 0.0
    computed_tokens: int = 0
    device_us: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence's last entry: how it finished, or what failed it.

    `field`: what of its request made it fail; the worker's own fault has none.
    """

    sequence: LiveSequence
    account: Account
    failure: str = ""
    field: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A sequence that never ran, nor its siblings.

    `full`: no room now; otherwise it could never run, because of `field` if that is named.
    """

    sequence_id: int
    full: bool
    message: str
    field: str = ""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine holds after a step. `last_sequence_id` is the last one looked at.

    `busy_us` is the time of all steps so far: what accounts were charged, to the microsecond.
    `preparing`: sequences that wait for a grammar, or with it for room; `waiting` has none of
    them. `levels` has the running and the waiting by priority, the lowest first.
    """

    last_sequence_id: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    step_count: int = 0
    preemptions: int = 0
    tokens_per_second: float = 0.0
    busy_us: int = 0
    preparing: int = 0
    levels: Sequence[Level] = ()


@dataclass(slots=True)
class EngineOutput:
    """Everything that one turn of the engine produced.

    `output` is None when nothing was computed (only endings or refusals, or a step that has
    only begun). `step_s` is the step's duration in seconds. `entered` and `begun` have the
    accounts of sequences whose first step has begun, and whose first token this is, by their
    ids. `failure` is what the batch raised.
    """

    output: SchedulerOutput | None = None
    step_s: float = 0.0
    updates: list[SequenceUpdate] = field(default_factory=list)
    entered: dict[int, Account] = field(default_factory=dict)
    begun: dict[int, Account] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    failure: Exception | None = None
    load: EngineLoad = field(default_factory=EngineLoad)

    @property
    def is_empty(self) -> bool:
        return self.output is None and not self.ended and not self.refused


class TokenRate:
    """Tokens per second over the last second's steps."""

    def __init__(self, window_s: float = 1.0) -> None:
        self._window_s = window_s
        self._steps: deque[tuple[float, int]] = deque()

    def add(self, now: float, tokens: int) -> None:
        self._steps.append((now, tokens))
        self._drop_old(now)

    def per_second(self, now: float) -> float:
        self._drop_old(now)
        return sum(tokens for _, tokens in self._steps) / self._window_s

    def _drop_old(self, now: float) -> None:
        while self._steps and self._steps[0][0] <= now - self._window_s:
            self._steps.popleft()
