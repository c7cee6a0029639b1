"""When waiting requests may join the batch. Used by the comparisons alone.

Continuous batching is what Noria does (Yu et al. 2022, "Orca"): a place that falls free is
taken at the next step. Static batching runs a full batch to its longest output before the
next begins. Dynamic batching is the same, but gives up waiting for a full batch after a
time; Triton's `dynamic_batching` is the well-known one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: prompt ids, the tokens that it wants, seconds after the start it comes at."""

    prompt: tuple[int, ...]
    output_tokens: int
    arrival_s: float = 0.0


# Who joins, and how many tokens are computed for each.
Admitted = list[tuple[Ask, int]]


class Policy(Protocol):
    """`patience_s`: how long after an arrival `admit` may decide otherwise; 0: it never does."""

    @property
    def patience_s(self) -> float: ...

    def admit(
        self, waiting: Sequence[Ask], num_running: int, now: float, more_to_come: bool
    ) -> Admitted: ...


@dataclass(frozen=True, slots=True)
class Continuous:
    """Whoever has come may join whenever there is a place."""

    max_num_seqs: int
    patience_s: float = 0.0

    def admit(
        self, waiting: Sequence[Ask], num_running: int, now: float, more_to_come: bool
    ) -> Admitted:
        return [(ask, ask.output_tokens) for ask in waiting[: self.max_num_seqs - num_running]]


@dataclass(frozen=True, slots=True)
class Batches:
    """A batch of `size`, and the next one when all of it has ended.

    A batch that is not full begins `patience_s` after its first request came; 0: it waits for
    more as long as more will come. Finished rows leave the batch, unless `keeps_rows`: then
    each is computed on until the longest has ended.
    """

    size: int
    patience_s: float = 0.0
    keeps_rows: bool = False

    def admit(
        self, waiting: Sequence[Ask], num_running: int, now: float, more_to_come: bool
    ) -> Admitted:
        if num_running or not waiting:
            return []
        late = bool(self.patience_s) and now >= waiting[0].arrival_s + self.patience_s
        if len(waiting) < self.size and more_to_come and not late:
            return []
        batch = waiting[: self.size]
        longest = max(ask.output_tokens for ask in batch)
        return [(ask, longest if self.keeps_rows else ask.output_tokens) for ask in batch]
