"""Who gives way to a sequence of a higher priority that waits for a place and for blocks."""

from collections import Counter
from collections.abc import Container, Iterable
from itertools import takewhile

from worker.block_pool import BlockPool
from worker.sequence import Sequence


def promised_blocks(sequence: Sequence, pool: BlockPool) -> int:
    """Blocks that a running sequence needs for tokens it has, and one to spare."""
    tokens = sequence.num_tokens + sequence.num_pending_tokens
    return pool.blocks_for(tokens) - len(sequence.block_ids) + 1


def giving_way(
    least_first: Iterable[Sequence],
    priority: int,
    pool: BlockPool,
    *,
    places: int,
    blocks: int,
    kept: Container[int] = (),
) -> list[Sequence] | None:
    """The fewest of lower priority, from the least urgent on, that leave this many places and
    blocks; None if all of them would not. Blocks in `kept` count as taken already.
    """
    lower = list(takewhile(lambda sequence: sequence.priority < priority, least_first))
    # Also where none of their blocks are shared, which is quick to see.
    most = sum(len(each.block_ids) + promised_blocks(each, pool) for each in lower)
    if len(lower) < places or most < blocks:
        return None
    dropped: Counter[int] = Counter()
    left = 0
    for number, sequence in enumerate(lower, 1):
        left += promised_blocks(sequence, pool)
        dropped.update(sequence.block_ids)
        left += sum(
            dropped[block] == pool.num_holders(block) and block not in kept
            for block in sequence.block_ids
        )
        if number >= places and left >= blocks:
            return lower[:number]
    return None
