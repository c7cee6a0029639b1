"""What a scheduler holds, by priority."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from worker.block_pool import BlockPool
from worker.sequence import Sequence


@dataclass(slots=True)
class WaitingTotals:
    """Of sequences that wait: how many, tokens they have yet to compute, blocks they will take
    with one to spare for each.
    """

    count: int = 0
    tokens: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class Level:
    """What one priority holds.

    `yielded_blocks`: how many more would be free, at least, if all that run at this priority
    and below it gave way.
    """

    priority: int
    running: int
    waiting: int
    waiting_tokens: int
    yielded_blocks: int


def levels_of(
    running: Iterable[Sequence], waiting: Mapping[int, WaitingTotals], pool: BlockPool
) -> list[Level]:
    """The lowest priority first."""
    by_priority: dict[int, list[Sequence]] = {priority: [] for priority in waiting}
    for sequence in running:
        by_priority.setdefault(sequence.priority, []).append(sequence)
    held, levels = 0, []
    for priority in sorted(by_priority):
        members, totals = by_priority[priority], waiting.get(priority, _NOBODY)
        held += sum(len(sequence.block_ids) for sequence in members)
        levels.append(
            Level(
                priority=priority,
                running=len(members),
                waiting=totals.count,
                waiting_tokens=totals.tokens,
                yielded_blocks=yielded_blocks(held, pool),
            )
        )
    return levels


def yielded_blocks(held: int, pool: BlockPool) -> int:
    """How many blocks are free, at least, once sequences with `held` of them gave way."""
    # Each hold beyond a block's first may be one that keeps it.
    return max(0, held - pool.num_doubled)


_NOBODY = WaitingTotals()
