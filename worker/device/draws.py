"""Choose one token per row of logits on a device, without asking it anything.

The draws are `worker.sampler`'s: what differs is that no branch depends on a logit. Which
rows are greedy, filtered or controlled is known on the host; everything else is a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worker.device.link import Link
from worker.filters import Filters, cut, weights_of
from worker.philox import uniforms
from worker.sequence import Draw

# As many of the largest are found without putting whole rows in order.
_FEW = 1024


@dataclass(frozen=True, slots=True)
class Drawn:
    """Of S rows: ids int64 [S]; `is_faulty` bool [S], where logits were no numbers."""

    ids: torch.Tensor
    is_faulty: torch.Tensor


def draw(logits: torch.Tensor, draws: Sequence[Draw], link: Link) -> Drawn:
    """logits fp32 [S, vocab_size], adjusted, one draw per row."""
    greatest, ids = logits.max(dim=-1)
    faulty = greatest.isnan() | (greatest == torch.inf)
    rows = [row for row, draw in enumerate(draws) if not draw.sampling.is_greedy]
    if rows:
        ids = _with_sampled(logits, greatest, ids, draws, rows, link)
    unbarred = [_lowest_unbarred(draw) for draw in draws]
    # The lowest of all is what the greatest of equal logits is.
    if rows or any(unbarred):
        ids = torch.where(greatest == -torch.inf, link.upload(np.array(unbarred)), ids)
    return Drawn(ids, faulty)


def _with_sampled(
    logits: torch.Tensor,
    greatest: torch.Tensor,
    ids: torch.Tensor,
    draws: Sequence[Draw],
    rows: list[int],
    link: Link,
) -> torch.Tensor:
    chosen = [draws[row] for row in rows]
    if len(rows) == len(draws):
        return _sampled(logits, greatest, chosen, link)
    at = link.upload(np.array(rows))
    sampled = _sampled(logits.index_select(0, at), greatest.index_select(0, at), chosen, link)
    return ids.index_copy(0, at, sampled)


def _sampled(
    logits: torch.Tensor, greatest: torch.Tensor, draws: Sequence[Draw], link: Link
) -> torch.Tensor:
    """Ids int64 [R] of rows that are not greedy, with maxima `greatest` [R].

    Where no logit is a number, or all are -infinity, any id: nobody asks for it.
    """
    filters, uniform = _parameters(draws, logits.shape[1], link)
    # A draw from weights that are no numbers would lie outside the vocabulary.
    usable = greatest.isfinite()
    peak = torch.where(usable, greatest, 0.0)
    sane = torch.where(usable.unsqueeze(1), logits, 0.0)
    weights = weights_of(sane, peak, filters.temperature)
    params = [draw.sampling for draw in draws]
    if any(p.top_k or p.top_p < 1 for p in params):
        weights = _ranked(sane, weights, filters, _num_ranked(draws, logits.shape[1]))
    if any(p.min_p for p in params):
        weights = weights.masked_fill(weights < filters.min_p.unsqueeze(1), 0.0)
    return places(weights, weights.cumsum(dim=-1), uniform)


def places(weights: torch.Tensor, cumulative: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Where uniform numbers [R] fall in weights [R, C]; never where a weight is zero.

    A sum that is formed in parallel may differ from one place to the next though nothing was
    added; so a place without weight takes the sum of the last that has one.
    """
    cumulative = torch.where(weights > 0, cumulative, 0.0).cummax(dim=-1).values
    targets = uniform * cumulative[:, -1]
    found = torch.searchsorted(cumulative, targets.unsqueeze(1), right=True).squeeze(1)
    return found.clamp(max=weights.shape[1] - 1)


def _num_ranked(draws: Sequence[Draw], vocab_size: int) -> int:
    """How many of each row's largest decide its cut: a share of them needs all, or top_k."""
    ranked = [draw.sampling for draw in draws if draw.sampling.top_k or draw.sampling.top_p < 1]
    most = max(p.top_k or vocab_size for p in ranked)
    return most if most <= min(_FEW, vocab_size) else vocab_size


def _ranked(
    logits: torch.Tensor, weights: torch.Tensor, filters: Filters, count: int
) -> torch.Tensor:
    """Weights without what top_k and top_p exclude; of equal logits the lowest ids stay."""
    if count == logits.shape[1]:
        largest = logits.sort(dim=-1, descending=True).values
    else:
        largest = logits.topk(count, dim=-1).values
    heaviest = weights_of(largest, largest[:, 0], filters.temperature)
    totals = weights.cumsum(dim=-1)[:, -1]
    at = cut(largest, heaviest, totals, filters)
    least = at.least.unsqueeze(1)
    above, tied = logits > least, logits == least
    room = at.counts - above.sum(dim=-1)
    kept = above | (tied & (tied.cumsum(dim=-1) <= room.unsqueeze(1)))
    unfiltered = at.counts >= logits.shape[1]
    return weights.masked_fill(~(kept | unfiltered.unsqueeze(1)), 0.0)


def _parameters(draws: Sequence[Draw], vocab_size: int, link: Link) -> tuple[Filters, torch.Tensor]:
    """The draws' filters and uniform numbers, in two copies."""
    params = [draw.sampling for draw in draws]
    floats = np.empty((4, len(draws)), np.float32)
    floats[0] = [p.temperature for p in params]
    floats[1] = [p.top_p for p in params]
    floats[2] = [p.min_p for p in params]
    floats[3] = uniforms(
        np.array([p.seed for p in params], np.uint64),
        np.array([draw.output_index for draw in draws], np.uint32),
        np.array([draw.choice for draw in draws], np.uint32),
    )
    temperature, top_p, min_p, uniform = link.upload(floats)
    top_k = link.upload(np.array([min(p.top_k or vocab_size, vocab_size) for p in params]))
    return Filters(temperature, top_k, top_p, min_p), uniform


def _lowest_unbarred(draw: Draw) -> int:
    """Chosen where every likelihood is zero."""
    barred = frozenset() if draw.may_end else draw.sampling.end_token_ids
    return next(token_id for token_id in range(len(barred) + 1) if token_id not in barred)
