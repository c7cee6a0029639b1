"""A sequence's part of one step, before it is computed and after."""

from typing import NamedTuple

from worker.scores import PromptLogprobs
from worker.sequence import (
    PENDING_TOKEN,
    Draw,
    SampledToken,
    ScheduledSequence,
    Scoring,
    Sequence,
)

RUNNERS_UP_TRACED = 4


class SequenceUpdate(NamedTuple):
    """What one step did to one sequence; `token` is None for an inner chunk of its tokens.

    `kv_tokens` and `kv_blocks` are what it held at the end of the step, before a finished
    sequence gave its blocks back.
    """

    sequence: Sequence
    scheduled: ScheduledSequence
    token: SampledToken | None
    kv_tokens: int
    kv_blocks: int
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def is_first_token(self) -> bool:
        """Whether the token is the first that this worker chose for the sequence."""
        draw = self.scheduled.draw
        return draw is not None and draw.output_index == self.sequence.num_given_tokens


def scheduled(sequence: Sequence, count: int) -> ScheduledSequence:
    """Its next `count` positions, with a draw if they reach its last token."""
    first = sequence.num_computed_tokens
    draw = None
    if count == sequence.num_uncomputed_tokens:
        draw = Draw(
            sequence.sampling,
            len(sequence.output_token_ids) + sequence.num_pending_tokens,
            sequence.choice,
            RUNNERS_UP_TRACED if sequence.trace_steps else 0,
            sequence.token_counts,
            sequence.matcher,
        )
    ids = sequence.token_ids(first, first + count)
    if len(ids) < count:
        ids.append(PENDING_TOKEN)
    scoring = _scoring(sequence, first, first + count) if sequence.scores_prompt else None
    return ScheduledSequence(sequence.sequence_id, ids, first, sequence.block_ids, draw, scoring)


def _scoring(sequence: Sequence, first: int, end: int) -> Scoring | None:
    """Positions of [first, end) that have yet to tell of the prompt token after them."""
    prompt, num_alternatives = sequence.prompt_token_ids, sequence.sampling.prompt_logprobs
    start, end = max(first, sequence.num_scored_tokens), min(end, len(prompt) - 1)
    if num_alternatives is None or start >= end:
        return None
    return Scoring(start - first, prompt[start + 1 : end + 1], num_alternatives)
