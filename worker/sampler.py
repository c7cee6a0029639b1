"""Choose one token per row of logits, by an address instead of a random state.

Greedy is the largest logit. Otherwise a draw is the inverse of the cumulative weights at
one uniform number that is a function of (seed, choice, output index) alone: ids in
ascending order, and filters do nothing but set weights to zero. So a draw does not depend
on the rest of the batch, nor on which filters left the same candidates.
"""

from collections.abc import Sequence

import numpy as np
import torch

from worker.philox import uniforms
from worker.sequence import Draw, SampledToken

# How many of the likeliest ids are looked at, in turn, until the filters' cut is among them.
# A sort of the whole vocabulary costs twenty times as much as the first of these.
_WIDTHS = (64, 1024, 8192)


class LogitsError(ArithmeticError):
    """The model gave NaN or infinity where a finite number should be."""


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
    """logits fp32 [S, vocab_size], one draw per row; `logits` is changed in place.

    Raises LogitsError naming the rows whose largest logit is NaN or +infinity.
    """
    _bar_ends(logits, draws)
    greatest, ids = logits.max(dim=-1)
    _check(greatest)
    sampled = [row for row, draw in enumerate(draws) if not draw.sampling.is_greedy]
    if sampled:
        chosen = [draws[row] for row in sampled]
        ids[sampled] = _draw(_rows(logits, sampled), greatest[sampled], chosen)
    if bool((greatest == -torch.inf).any()):
        _choose_unbarred(greatest, ids, draws)
    return [
        _sampled_token(token_id, logits[row], draws[row])
        for row, token_id in enumerate(ids.tolist())
    ]


def _bar_ends(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Before `min_tokens` outputs nothing that would end the sequence can be chosen."""
    barred = [(row, token_id) for row, draw in enumerate(draws) for token_id in _barred(draw)]
    if barred:
        rows, ids = torch.tensor(barred).unbind(1)
        logits[rows, ids] = -torch.inf


def _barred(draw: Draw) -> frozenset[int]:
    early = draw.output_index < draw.sampling.min_tokens
    return draw.sampling.end_token_ids if early else frozenset()


def _check(greatest: torch.Tensor) -> None:
    faulty = (greatest.isnan() | (greatest == torch.inf)).nonzero().flatten().tolist()
    if faulty:
        raise LogitsError(f"logits are NaN or infinite in rows {faulty} of {len(greatest)}")


def _choose_unbarred(greatest: torch.Tensor, ids: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Where every likelihood is zero: the lowest id that is not barred."""
    for row in (greatest == -torch.inf).nonzero().flatten().tolist():
        barred = _barred(draws[row])
        ids[row] = next(i for i in range(len(barred) + 1) if i not in barred)


def _draw(logits: torch.Tensor, greatest: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Ids int64 [R], one per row of logits [R, vocab_size] with maxima `greatest` [R].

    The first id whose cumulative weight exceeds u * total has a weight above zero, and it
    exists: u is at most 1 - 2^-24, and an fp32 total times that rounds to below the total.
    """
    temperatures = torch.tensor([draw.sampling.temperature for draw in draws])
    weights = (logits - greatest.unsqueeze(1)).div_(temperatures.unsqueeze(1)).exp_()
    _filter(logits, weights, draws)
    cumulative = weights.cumsum(dim=-1)
    targets = torch.from_numpy(_uniforms(draws)) * cumulative[:, -1]
    found = torch.searchsorted(cumulative, targets.unsqueeze(1), right=True).squeeze(1)
    return found.clamp_(max=logits.shape[1] - 1)


def _uniforms(draws: Sequence[Draw]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return uniforms(
        np.array([draw.sampling.seed for draw in draws], np.uint64),
        np.array([draw.output_index for draw in draws], np.uint32),
        np.array([draw.choice for draw in draws], np.uint32),
    )


def _filter(logits: torch.Tensor, weights: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Set to zero, in place, the weights that top_k and then top_p exclude."""
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
    """Filter those of `rows` whose cut lies within the `width` likeliest ids; return them.

    Order is by logit, and by id among equal ones; top_p counts mass of what top_k left.
    """
    row_logits, row_weights = _rows(logits, rows), _rows(weights, rows)
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


def _sampled_token(token_id: int, logits: torch.Tensor, draw: Draw) -> SampledToken:
    """With what was asked about the alternatives. A greedy draw reports temperature 1."""
    if not draw.num_runners_up:
        return SampledToken(token_id)
    temperature = 1.0 if draw.sampling.is_greedy else draw.sampling.temperature
    probabilities = torch.softmax((logits - logits.max()) / temperature, dim=-1)
    likeliest = (
        (other, float(probabilities[other]))
        for other in _likeliest(logits, draw.num_runners_up + 1)
        if other != token_id and probabilities[other] > 0
    )
    runners_up = tuple(likeliest)[: draw.num_runners_up]
    return SampledToken(token_id, float(probabilities[token_id]), runners_up)


def _likeliest(logits: torch.Tensor, count: int) -> list[int]:
    """Ids of the `count` largest logits, largest first, lower ids first among equal ones."""
    least = logits.topk(min(count, len(logits))).values[-1]
    ids = (logits >= least).nonzero().flatten()
    order = torch.argsort(logits[ids], descending=True, stable=True)
    return ids[order][:count].tolist()


def _rows(matrix: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The given rows; without a copy where they are all."""
    return matrix if len(rows) == len(matrix) else matrix[rows]
