"""Which ids stay candidates: top_k, then top_p of what it left, then min_p.

A filter does nothing but set weights to zero. top_k and top_p rank by logit, and by id
among equal ones; min_p compares each weight with the largest. No sort of the vocabulary
where a few of the likeliest ids hold the cut.
"""

from collections.abc import Sequence

import torch

from worker.sequence import Draw

# How many of the likeliest ids are looked at, in turn, until the filters' cut is among them.
# A sort of the whole vocabulary costs twenty times as much as the first of these.
_WIDTHS = (64, 1024, 8192)


def exclude(logits: torch.Tensor, weights: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Set to zero, in place, the weights of ids that the draws' filters exclude.

    logits and weights fp32 [R, vocab_size]; a row's largest weight is 1.
    """
    _exclude_by_rank(logits, weights, draws)
    floors = [draw.sampling.min_p for draw in draws]
    if any(floors):
        weights.masked_fill_(weights < torch.tensor(floors).unsqueeze(1), 0.0)


def _exclude_by_rank(logits: torch.Tensor, weights: torch.Tensor, draws: Sequence[Draw]) -> None:
    vocab_size = logits.shape[1]
    top_k = [min(draw.sampling.top_k or vocab_size, vocab_size) for draw in draws]
    top_p = [draw.sampling.top_p for draw in draws]
    pending = [row for row in range(len(draws)) if top_k[row] < vocab_size or top_p[row] < 1.0]
    for width in (*(width for width in _WIDTHS if width < vocab_size), vocab_size):
        ready = [row for row in pending if top_k[row] < width or top_k[row] == vocab_size]
        if ready:
            limits = torch.tensor([top_k[row] for row in ready])
            shares = torch.tensor([top_p[row] for row in ready])
            decided = _cut(logits, weights, ready, limits, shares, width)
            pending = [row for row in pending if row not in decided]


def _cut(
    logits: torch.Tensor,
    weights: torch.Tensor,
    rows: list[int],
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    width: int,
) -> set[int]:
    """Filter those of `rows` whose cut lies within the `width` likeliest ids; return them."""
    row_logits, row_weights = rows_of(logits, rows), rows_of(weights, rows)
    values, ids = _largest(row_logits, width)
    counts = _counts(row_weights, row_weights.gather(1, ids), top_k, top_p)
    decided = (counts < width) | (width == logits.shape[1])
    least = values.gather(1, (counts - 1).clamp(max=width - 1).unsqueeze(1))
    excluded = row_logits < least.masked_fill(~decided.unsqueeze(1), -torch.inf)
    row_weights.masked_fill_(excluded, 0.0)
    following = values.gather(1, counts.clamp(max=width - 1).unsqueeze(1))
    for at in (decided & (following == least).squeeze(1)).nonzero().flatten().tolist():
        _drop_surplus_ties(row_logits[at], row_weights[at], least[at], int(counts[at]))
    if row_weights is not weights:
        weights[rows] = row_weights
    return {row for row, done in zip(rows, decided.tolist(), strict=True) if done}


def _counts(
    weights: torch.Tensor, likeliest: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """How many ids each row keeps, int64 [R]; more than there are in `likeliest`: unknown.

    likeliest [R, width]: the largest of `weights` [R, vocab_size], largest first. top_k is
    below width, or vocab_size where it is off.
    """
    width = likeliest.shape[1]
    likeliest.masked_fill_(torch.arange(width) >= top_k.unsqueeze(1), 0.0)
    mass = likeliest.cumsum(dim=-1)
    total = torch.where(top_k <= width, mass[:, -1], weights.cumsum(dim=-1)[:, -1])
    nucleus = (mass < (top_p * total).unsqueeze(1)).sum(dim=-1) + 1
    return torch.where(top_p < 1.0, torch.minimum(nucleus, top_k), top_k)


def _largest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids of each row's `width` largest, largest first; ties in any order."""
    if width == logits.shape[1]:
        ordered, order = logits.sort(dim=-1, descending=True)
        return ordered, order
    values, ids = logits.topk(width, dim=-1)
    return values, ids


def _drop_surplus_ties(
    logits: torch.Tensor, weights: torch.Tensor, least: torch.Tensor, count: int
) -> None:
    """Of the ids whose logit is `least` keep the lowest, so that `count` are kept in all."""
    tied = (logits == least).nonzero().flatten()
    weights[tied[count - int((logits > least).sum()) :]] = 0.0


def rows_of(matrix: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The given rows; without a copy where they are all."""
    return matrix if len(rows) == len(matrix) else matrix[rows]
