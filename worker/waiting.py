"""Sequences that are not in the batch, and what they will need.

Totals are kept rather than counted, so that a long line costs a step nothing.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from worker.block_tables import BlockTables
from worker.levels import WaitingTotals
from worker.precedence import PrecedenceList
from worker.sequence import Sequence


class WaitingLine:
    """Those that wait for a place, by precedence, and those that stand aside.

    Further choices of a request stand aside until the first has computed the prompt. Then
    they find its full blocks in the prefix cache: each computes again what comes after the
    last of them, at most one block of the prompt.

    `levels` has the totals of each priority that anybody here has.
    """

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._waiting = PrecedenceList()
        # By the id of the choice that computes their prompt.
        self._aside: dict[int, list[Sequence]] = {}
        self._first_of: dict[int, int] = {}
        self.levels: dict[int, WaitingTotals] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._first_of)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._waiting, *self._aside.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that all have yet to compute."""
        return sum(level.tokens for level in self.levels.values())

    def ahead_of(self, priority: int) -> WaitingTotals:
        """The totals of those of at least this priority."""
        ahead = [level for at, level in self.levels.items() if at >= priority]
        return WaitingTotals(
            sum(level.count for level in ahead),
            sum(level.tokens for level in ahead),
            sum(level.blocks for level in ahead),
        )

    @property
    def is_anyone_ready(self) -> bool:
        """Whether somebody waits for a place and for nothing else."""
        return len(self._waiting) > 0

    @property
    def num_aside(self) -> int:
        return len(self._first_of)

    @property
    def head(self) -> Sequence:
        """The most urgent of those that wait for a place. Raises IndexError."""
        return self._waiting.most_urgent

    def add(self, sequence: Sequence, siblings: Iterable[Sequence] = ()) -> None:
        """It waits for a place, its siblings for its prompt."""
        self._waiting.add(sequence)
        self._count(sequence, 1)
        for sibling in siblings:
            self._aside.setdefault(sequence.sequence_id, []).append(sibling)
            self._first_of[sibling.sequence_id] = sequence.sequence_id
            self._count(sibling, 1)

    def call_siblings(self, sequence_id: int) -> None:
        """Those that stood aside wait for places: the prompt's blocks can be found now."""
        for sibling in self._leave_aside(sequence_id):
            self.add(sibling)

    def promote_sibling(self, sequence_id: int) -> None:
        """The first choice is gone before it had the prompt: the next one computes it."""
        siblings = self._leave_aside(sequence_id)
        if siblings:
            self.add(siblings[0], siblings[1:])

    def remove(self, sequence: Sequence) -> None:
        """Take it out, wherever it waits. Raises RuntimeError if it does not."""
        self._count(sequence, -1)
        first = self._first_of.pop(sequence.sequence_id, None)
        if first is None:
            self._waiting.remove(sequence)
            return
        self._aside[first].remove(sequence)
        if not self._aside[first]:
            del self._aside[first]

    def blocks_of(self, sequence: Sequence, *, aside: bool) -> int:
        """Blocks that a sequence will take, with one to spare."""
        tokens = sequence.num_tokens - (self._tables.num_shared(sequence) if aside else 0)
        return self._tables.pool.blocks_for(tokens) + 1

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the totals are those of the sequences."""
        told, self.levels = self.levels, {}
        for sequence in self:
            self._count(sequence, 1)
        counted, self.levels = self.levels, told
        if counted != told:
            raise RuntimeError("those that wait are miscounted")

    def _leave_aside(self, sequence_id: int) -> list[Sequence]:
        siblings = self._aside.pop(sequence_id, [])
        for sibling in siblings:
            self._count(sibling, -1)
            del self._first_of[sibling.sequence_id]
        return siblings

    def _count(self, sequence: Sequence, sign: int) -> None:
        aside = sequence.sequence_id in self._first_of
        shared = self._tables.num_shared(sequence) if aside else 0
        level = self.levels.setdefault(sequence.priority, WaitingTotals())
        level.count += sign
        level.tokens += sign * (sequence.num_tokens - shared)
        level.blocks += sign * self.blocks_of(sequence, aside=aside)
        if not level.count:
            del self.levels[sequence.priority]
