"""Small engines for tests: a deterministic language model without tensors."""

from worker.block_pool import BlockPool
from worker.scheduler import Scheduler
from worker.scores import PromptLogprobs, StepResult
from worker.sequence import (
    SampledToken,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
)

VOCAB = 1000


def next_id(history: list[int]) -> int:
    """The token that follows a history: some fixed function of every id and position."""
    state = 7
    for position, token_id in enumerate(history):
        state = (state * 31 + token_id * 17 + position) % 1_000_003
    return state % VOCAB


def expected_output(prompt: list[int], count: int) -> list[int]:
    """What the language model of `next_id` says after a prompt."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_id(history))
    return history[len(prompt) :]


def score_by_name(entry: ScheduledSequence) -> PromptLogprobs:
    """ "Log-probabilities" that say which position they are of, and which token."""
    first = entry.first_position + entry.scoring.first_row
    own = [float(-at) for at in range(first, first + len(entry.scoring.next_token_ids))]
    return PromptLogprobs(own, [1] * len(own), list(entry.scoring.next_token_ids), own)


class BlockMemory:
    """A runner that keeps each token in the slot its block table names, as a KV cache does.

    It reads the history back through the table, so a shared, lost or misplaced block
    changes the output.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.block_size = pool.block_size
        self.slots: dict[tuple[int, int], int] = {}
        self.outputs: list[SchedulerOutput] = []
        self.num_positions_fed = 0

    def launch(self, output: SchedulerOutput) -> StepResult:
        return self.execute(output)

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.outputs.append(output)
        self.num_positions_fed += output.num_tokens
        tokens, scores = {}, {}
        for entry in output.scheduled:
            for at, token_id in enumerate(entry.token_ids, entry.first_position):
                self.slots[self._slot(entry.block_ids, at)] = token_id
            if entry.draw is not None:
                length = entry.first_position + entry.num_tokens
                history = [self.slots[self._slot(entry.block_ids, at)] for at in range(length)]
                tokens[entry.sequence_id] = SampledToken(next_id(history))
            if entry.scoring is not None:
                scores[entry.sequence_id] = score_by_name(entry)
        return StepResult(tokens, scores)

    def _slot(self, block_ids, position):
        return block_ids[position // self.block_size], position % self.block_size


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 128,
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )


def make_sequence(
    sequence_id: int,
    prompt: int | list[int] = 5,
    max_tokens: int = 4,
    *,
    priority: int = 0,
    eos: frozenset[int] = frozenset(),
    **fields,
) -> Sequence:
    """A sequence with a prompt of so many ids (or the given ones)."""
    ids = (
        [(sequence_id * 37 + i * 11) % VOCAB for i in range(prompt)]
        if isinstance(prompt, int)
        else prompt
    )
    sampling = SamplingParams(temperature=0.0, eos_token_ids=eos)
    return Sequence(
        sequence_id, ids, sampling, max_tokens, order=sequence_id, priority=priority, **fields
    )
