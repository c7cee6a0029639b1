"""The draw itself: the inverse of the cumulative weights at one uniform number per row.

Rows whose filters leave few ids are decided by their likeliest blocks alone; only what is
left of them is weighed. Which way a row goes changes no draw: weights of excluded ids are
zero, and adding zeros in between changes no sum.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from worker.filters import Cut, cut, exclude, filters_of, weights_of
from worker.narrowing import can_narrow, largest, narrowed, whole
from worker.philox import uniforms
from worker.sequence import Draw

# How many of the likeliest ids are looked at, in turn, until the filters' cut is among them.
_WIDTHS = (64, 256, 1024)
# Where these do not decide a row, one in so many of its logits shows how many ids to put in
# order, so that what is left out is likely to be this part of what top_p leaves out.
_SAMPLED, _LEFT_OUT = 16, 0.9
# Numbers that one thread's cache holds: rows are gone through in chunks of so many.
_CHUNK = 1 << 18
# Weights of neighbouring logits may be out of order by so much.
_SLACK = 1.001


def drawn(logits: torch.Tensor, greatest: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Ids int64 [R], one per row of logits fp32 [R, vocab_size] with maxima `greatest` [R]."""
    return _Rows(logits, greatest, draws).drawn()


class _Rows:
    """Rows to draw from, and what has been drawn."""

    def __init__(self, logits: torch.Tensor, greatest: torch.Tensor, draws: Sequence[Draw]) -> None:
        self._logits = logits
        self._vocab_size = logits.shape[1]
        self._greatest = greatest
        self._filters = filters_of(draws, logits.shape[1])
        self._top_k = self._filters.top_k.tolist()
        self._uniforms = _uniforms(draws)
        self._totals = torch.zeros(len(draws))
        self._ids = torch.zeros(len(draws), dtype=torch.int64)
        params = [draw.sampling for draw in draws]
        self._ranked = {row for row, p in enumerate(params) if p.top_p < 1 or self._is_top_k(row)}
        # Those of which top_p is known to keep more ids than are looked at before all are.
        self._wide: set[int] = set()
        self._floored = {row for row, p in enumerate(params) if p.min_p} - self._ranked

    def drawn(self) -> torch.Tensor:
        self._weigh([row for row in sorted(self._ranked) if not self._is_top_k(row)])
        pending = set(range(len(self._ids)))
        # To weigh a few whole rows takes less than to narrow them.
        pays = len(self._floored) * self._vocab_size > _CHUNK
        narrowable = self._ranked | (self._floored if pays else set())
        widths = [width for width in _WIDTHS if can_narrow(self._vocab_size, width)]
        for width in widths or [self._vocab_size]:
            rows = sorted((narrowable & pending) - self._wide)
            fitting = [r for r in rows if self._top_k[r] <= width or not self._is_top_k(r)]
            pending.difference_update(self._draw_narrowed(fitting, width))
        for row in pending & self._ranked:
            self._draw_ranked(row)
        for part in self._chunks(sorted(pending - self._ranked)):
            self._draw_unranked(part)
        return self._ids

    def _is_top_k(self, row: int) -> bool:
        return bool(self._top_k[row] < self._vocab_size)

    def _weigh(self, rows: list[int]) -> None:
        """Weights of whole rows: top_p is a share of them."""
        for part in self._chunks(rows):
            self._totals[part] = self._weights(part).cumsum(dim=-1)[:, -1]

    def _draw_narrowed(self, rows: list[int], width: int) -> list[int]:
        """Draw for those rows that their `width` likeliest ids decide, and return these."""
        if not rows:
            return []
        filters, greatest = self._filters.of(rows), self._greatest[rows]
        logits = rows_of(self._logits, rows)
        near = narrowed(logits, width) if width < logits.shape[1] else whole(logits)
        weights = weights_of(near.largest, greatest, filters.temperature)
        at = cut(near.largest, weights, self._totals[rows], filters)
        beyond = weights_of(near.bound.unsqueeze(1), greatest, filters.temperature).squeeze(1)
        unranked = at.counts == self._vocab_size
        decided = (at.least > near.bound) | (unranked & (beyond * _SLACK < filters.min_p))
        # The ids that follow weigh no more than the last of these.
        reach = weights.sum(dim=-1) + weights[:, -1] * max(_WIDTHS, default=0)
        wide = reach * _SLACK < filters.top_p * self._totals[rows]
        self._wide.update(rows[place] for place in _rows(wide & ~decided))
        done = _rows(decided)
        if not done:
            return []
        decided_rows = [rows[place] for place in done]
        values, ids = rows_of(near.values, done), rows_of(near.ids, done)
        self._draw_from(decided_rows, values, ids, at.of(done))
        return decided_rows

    def _draw_ranked(self, row: int) -> None:
        """Draw for a row of which many ids stay: so many of its logits are put in order."""
        logits, filters = self._logits[row : row + 1], self._filters.of([row])
        values = logits[0].numpy()
        for least in (self._likely_cut(row), -np.inf):
            ids = np.flatnonzero(values >= least)
            near = torch.from_numpy(values[ids]).unsqueeze(0)
            ordered = largest(near, min(len(ids), self._top_k[row]))
            weights = weights_of(ordered, self._greatest[[row]], filters.temperature)
            at = cut(ordered, weights, self._totals[[row]], filters)
            if bool(at.counts <= ordered.shape[1]):
                break
        self._draw_from([row], near, torch.from_numpy(ids).unsqueeze(0), at)

    def _likely_cut(self, row: int) -> float:
        """A logit that is probably below the cut of top_p, and not far below it.

        What is below the cut are many small weights, whose sum a part of them tells well; the
        few large ones need not be among these. Where top_k cuts, the least of its ids.
        """
        if self._is_top_k(row):
            return float(largest(self._logits[row : row + 1], self._top_k[row])[0, -1])
        part = torch.from_numpy(np.sort(self._logits[row, ::_SAMPLED].numpy()))
        filters = self._filters.of([row])
        below = weights_of(part.unsqueeze(0), self._greatest[[row]], filters.temperature)
        left_out = (1 - filters.top_p) * self._totals[row] * (_LEFT_OUT / _SAMPLED)
        place = int(torch.searchsorted(below.cumsum(dim=-1)[0], left_out))
        return float(part[min(place, len(part) - 1)])

    def _draw_from(self, rows: list[int], logits: torch.Tensor, ids: torch.Tensor, at: Cut) -> None:
        """Draw among some ids [R, C] of each row, all of those at least that are kept."""
        filters = self._filters.of(rows)
        weights = weights_of(logits, self._greatest[rows], filters.temperature)
        exclude(logits, weights, at, filters)
        places = _places(weights, self._uniforms[rows])
        self._ids[rows] = ids.gather(1, places.unsqueeze(1)).squeeze(1)

    def _draw_unranked(self, rows: list[int]) -> None:
        """Draw for rows of which every id may stay."""
        weights, floors = self._weights(rows), self._filters.min_p[rows]
        if bool((floors > 0).any()):
            weights.mul_(weights >= floors.unsqueeze(1))
        self._ids[rows] = _places(weights, self._uniforms[rows])

    def _weights(self, rows: list[int]) -> torch.Tensor:
        temperature = self._filters.temperature[rows]
        return weights_of(rows_of(self._logits, rows), self._greatest[rows], temperature)

    def _chunks(self, rows: list[int]) -> Iterator[list[int]]:
        return _chunks(rows, self._logits.shape[1])


def log_weights(
    logits: torch.Tensor, greatest: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """Natural logarithm of the sum of `weights_of` for each row, [R]."""
    rows = list(range(len(logits)))
    parts = [
        weights_of(rows_of(logits, part), greatest[part], temperature[part]).cumsum(dim=-1)[:, -1]
        for part in _chunks(rows, logits.shape[1])
    ]
    return torch.cat(parts).log()


def _chunks(rows: list[int], vocab_size: int) -> Iterator[list[int]]:
    size = max(1, _CHUNK * torch.get_num_threads() // vocab_size)
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def _places(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Places int64 [R] in weights [R, C] at which the uniform numbers [R] fall.

    The first place whose cumulative weight exceeds u * total has a weight above zero, and
    it exists: u is at most 1 - 2^-24, and an fp32 total times that rounds to below the total.
    """
    cumulative = weights.cumsum(dim=-1)
    targets = uniform * cumulative[:, -1]
    found = torch.searchsorted(cumulative, targets.unsqueeze(1), right=True).squeeze(1)
    return found.clamp_(max=weights.shape[1] - 1)


def _rows(chosen: torch.Tensor) -> list[int]:
    rows: list[int] = chosen.nonzero().flatten().tolist()
    return rows


def rows_of(matrix: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The given rows; without a copy where they are all, or follow each other."""
    first, end = rows[0], rows[-1] + 1
    return matrix[first:end] if rows == list(range(first, end)) else matrix[rows]


def _uniforms(draws: Sequence[Draw]) -> torch.Tensor:
    made = uniforms(
        np.array([draw.sampling.seed for draw in draws], np.uint64),
        np.array([draw.output_index for draw in draws], np.uint32),
        np.array([draw.choice for draw in draws], np.uint32),
    )
    return torch.from_numpy(made)
