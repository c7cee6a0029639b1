"""A sequence's part of one step, before it is computed and after."""

from dataclasses import dataclass

from worker.sequence import Draw, SampledToken, ScheduledSequence, Sequence

RUNNERS_UP_TRACED = 4


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What one step did to one sequence; `token` is None for an inner chunk of its tokens.

    `kv_tokens` and `kv_blocks` are what it held at the end of the step, before a finished
    sequence gave its blocks back.
    """

    sequence: Sequence
    scheduled: ScheduledSequence
    token: SampledToken | None
    kv_tokens: int
    kv_blocks: int

    @property
    def is_first_token(self) -> bool:
        """Whether the token is the first that this worker chose for the sequence."""
        draw = self.scheduled.draw
        return draw is not None and draw.output_index == self.sequence.num_given_tokens


def scheduled(sequence: Sequence, count: int) -> ScheduledSequence:
    """Its next `count` positions, with a draw if they reach its last token."""
    first = sequence.num_computed_tokens
    draw = None
    if first + count == sequence.num_tokens:
        draw = Draw(
            sequence.sampling,
            len(sequence.output_token_ids),
            sequence.choice,
            RUNNERS_UP_TRACED if sequence.trace_steps else 0,
            sequence.token_counts,
        )
    ids = sequence.token_ids(first, first + count)
    return ScheduledSequence(sequence.sequence_id, ids, first, sequence.block_ids, draw)
