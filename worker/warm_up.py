"""The first steps of a runner: compiled, checked and, for the largest, measured."""

from typing import Protocol

from worker.scores import StepResult
from worker.sequence import Draw, SamplingParams, ScheduledSequence, SchedulerOutput

_TOKENS = 64
# Asks for all that a draw can cost.
_DEMANDING = SamplingParams(top_p=0.5, logprobs=1)


class Executing(Protocol):
    """Computes a step at once."""

    num_positions_fed: int

    def execute(self, output: SchedulerOutput) -> StepResult: ...


def warm_up(runner: Executing, block_size: int) -> None:
    """A prefill and a decode before anything is cached, so that no request pays for firsts.

    It writes to the first blocks after the null one; nothing may be in use yet. Raises
    ValueError for a model that gives no numbers.
    """
    tokens = min(_TOKENS, block_size)
    for first, count in ((0, tokens - 1), (tokens - 1, 1)):
        if count and not runner.execute(_one(first, count)).tokens:
            raise ValueError("the model's logits are NaN or infinite: its weights are damaged")
    runner.num_positions_fed = 0


def largest_step(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> SchedulerOutput:
    """As many positions as a step may have, of as many sequences, each with a draw.

    All of them in block 1: what is computed is of no use, but takes the memory of what is.
    """
    left = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    entries = []
    for number in range(max_num_seqs):
        count = min(left // (max_num_seqs - number), max_model_len)
        left -= count
        blocks = [1] * -(-count // block_size)
        draw = Draw(_DEMANDING, output_index=0)
        entries.append(ScheduledSequence(number, [0] * count, 0, blocks, draw))
    entries.sort(key=lambda entry: entry.num_tokens > 1)
    return SchedulerOutput(0, tuple(entries), sum(entry.num_tokens for entry in entries))


def _one(first: int, count: int) -> SchedulerOutput:
    draw = Draw(SamplingParams(top_p=0.5), output_index=0)
    return SchedulerOutput(0, (ScheduledSequence(0, [0] * count, first, [1], draw),), count)
