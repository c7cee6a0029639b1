"""The engine's steps for one request, in the order in which they were computed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from noria.explain.observation import Observation
from noria.v1 import common_pb2


class Stage(Enum):
    """What a step did for the request.

    AGAIN computes positions that were computed before: the sequence had been preempted.
    """

    PREFILL = auto()
    DECODE = auto()
    AGAIN = auto()


@dataclass(frozen=True, slots=True)
class Token:
    """An id, the bytes it stands for, and its probability where it was chosen."""

    id: int
    piece: bytes
    probability: float = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `number` counts decode steps from 1; `at_us` is when the client heard of it.

    `token_in` is the output token whose position a decode step computed.
    """

    stage: Stage
    number: int
    at_us: int
    record: common_pb2.StepRecord
    token_in: Token | None = None

    @property
    def chosen(self) -> Token | None:
        """The token that the step chose; None for a chunk that is not the prompt's last."""
        record = self.record
        if not record.HasField("token_id"):
            return None
        return Token(record.token_id, record.token_bytes, record.probability)

    @property
    def last_position(self) -> int:
        return self.record.first_position + self.record.num_positions - 1


def steps_of(seen: Observation) -> list[Step]:
    """All steps that the stream told of."""
    steps: list[Step] = []
    output: list[Token] = []
    computed = decoded = 0
    num_prompt = seen.timeline.usage.input_tokens or _num_prompt(seen)
    for at_us, record in _records(seen):
        stage = _stage(record, num_prompt, computed)
        decoded += stage is Stage.DECODE
        index = record.first_position - num_prompt
        token_in = output[index] if stage is Stage.DECODE and index < len(output) else None
        step = Step(stage, decoded if stage is Stage.DECODE else 0, at_us, record, token_in)
        steps.append(step)
        computed = max(computed, record.first_position + record.num_positions)
        if (chosen := step.chosen) is not None:
            output.append(chosen)
    return steps


def runs_of(steps: Iterable[Step]) -> Iterator[list[Step]]:
    """The steps in runs of one stage."""
    run: list[Step] = []
    for step in steps:
        if run and step.stage is not run[0].stage:
            yield run
            run = []
        run.append(step)
    if run:
        yield run


def _records(seen: Observation) -> Iterator[tuple[int, common_pb2.StepRecord]]:
    for arrival in seen.arrivals:
        if arrival.event.choice == 0:
            for record in arrival.event.content_block_delta.steps:
                yield arrival.at_us, record


def _num_prompt(seen: Observation) -> int:
    starts = (a.event.message_start.usage.input_tokens for a in seen.arrivals)
    return next(starts, 0)


def _stage(record: common_pb2.StepRecord, num_prompt: int, computed: int) -> Stage:
    if record.first_position < computed:
        return Stage.AGAIN
    return Stage.PREFILL if record.first_position < num_prompt else Stage.DECODE
