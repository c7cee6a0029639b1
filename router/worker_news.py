"""What a worker tells of an attempt, as plain data."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from router.timeline import Reported


class Finish(Enum):
    """Why a worker stopped an attempt that ran."""

    EOS = auto()
    STOP_ID = auto()
    LENGTH = auto()
    ABORTED = auto()
    EXPIRED = auto()


class Refusal(Enum):
    """Why a worker did not run an attempt, or could not go on."""

    FULL = auto()
    DRAINING = auto()
    INVALID = auto()
    INTERNAL = auto()


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The engine's record of one step, opaque here, and whether it chose an id."""

    record: object
    chose_token: bool


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """An id's natural log-probability, and (id, log-probability) of alternatives.

    The id was chosen, or is the prompt's. Nothing precedes the first of the prompt: None.
    """

    logprob: float | None
    alternatives: Sequence[tuple[int, float]]


@dataclass(slots=True)
class NewTokens:
    """What a step brought for one choice of a stream.

    `waited_us` comes when the first position is about to be computed, and as part of
    `durations_us` (of waiting and prefill) with the first id, as does `cached_tokens`.
    `last_is_end`: the last id is EOS or a stop id, and ended the output. `chosen` is empty,
    or has an entry for each id. `finish`: why the choice ended while others go on.
    `prompt` has the next ids of the prompt, from the second on, if they are to be told of.
    """

    token_ids: Sequence[int]
    steps: Sequence[TracedStep] = ()
    cached_tokens: int | None = None
    waited_us: int | None = None
    durations_us: Reported = ()
    last_is_end: bool = False
    choice: int = 0
    chosen: Sequence[ChosenToken] = ()
    finish: Finish | None = None
    prompt: Sequence[ChosenToken] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker computed for an attempt, whatever became of it.

    The prompt counts if anything was computed for it. `device_us` is its share of the time of
    the worker's steps, in microseconds.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    device_us: int = 0


NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker says of an attempt that ran, in its last entry.

    `output_tokens` are those of all choices, `durations_us` those before the first token.
    """

    output_tokens: int = 0
    preemptions: int = 0
    durations_us: Reported = ()
    decode_us: int = 0
    work: Work = NO_WORK
