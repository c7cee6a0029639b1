"""Which ids stay candidates: top_k, then top_p of what it left, then min_p.

A filter does nothing but set weights to zero. top_k and top_p rank by logit, and by id
among equal ones; min_p compares each weight with the largest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.sequence import Draw


@dataclass(frozen=True, slots=True)
class Filters:
    """Of R rows, [R] each: `top_k` is vocab_size and `top_p` 1 where they are off."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def of(self, rows: Sequence[int]) -> "Filters":
        """Those of some rows."""
        at = torch.tensor(rows)
        return Filters(self.temperature[at], self.top_k[at], self.top_p[at], self.min_p[at])


def filters_of(draws: Sequence[Draw], vocab_size: int) -> Filters:
    """What the draws ask for."""
    params = [draw.sampling for draw in draws]
    return Filters(
        torch.tensor([p.temperature for p in params]),
        torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params]),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.min_p for p in params]),
    )


def weights_of(
    logits: torch.Tensor, greatest: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """exp((logits - greatest) / temperature), [R, C]; a row's greatest logit weighs 1."""
    scaled = logits - greatest.unsqueeze(1)
    return scaled.div_(temperature.unsqueeze(1)).exp_()


@dataclass(frozen=True, slots=True)
class Cut:
    """How many ids top_k and top_p keep of each row, [R], and the least of their logits.

    A count beyond what was looked at is a bound from below, and `least` -infinity.
    """

    counts: torch.Tensor
    least: torch.Tensor

    def of(self, rows: Sequence[int]) -> "Cut":
        """That of some rows."""
        at = torch.tensor(rows)
        return Cut(self.counts[at], self.least[at])


def cut(likeliest: torch.Tensor, weights: torch.Tensor, totals: torch.Tensor, to: Filters) -> Cut:
    """Where top_k and top_p cut.

    likeliest [R, n]: the rows' largest logits, largest first, with their weights. `totals`
    [R] are the weights of whole rows; where top_k is at most n they do not matter.
    """
    width = likeliest.shape[1]
    ranks = torch.arange(width, device=weights.device)
    kept = weights.masked_fill(ranks >= to.top_k.unsqueeze(1), 0.0)
    mass = kept.cumsum(dim=-1)
    whole = torch.where(to.top_k <= width, mass[:, -1], totals)
    nucleus = torch.searchsorted(mass, (to.top_p * whole).unsqueeze(1)).squeeze(1) + 1
    counts = torch.where(to.top_p < 1.0, torch.minimum(nucleus, to.top_k), to.top_k)
    least = likeliest.gather(1, (counts - 1).clamp(max=width - 1).unsqueeze(1)).squeeze(1)
    return Cut(counts, least.where(counts <= width, -torch.inf))


def exclude(logits: torch.Tensor, weights: torch.Tensor, at: Cut, to: Filters) -> None:
    """Set weights [R, C] to zero, in place, where the filters exclude an id.

    logits [R, C]: by ascending id, and at least all that are not below the cut.
    """
    kept = logits >= at.least.unsqueeze(1)
    surplus = kept.sum(dim=-1) - at.counts
    weights.masked_fill_(~kept, 0.0)
    if bool((to.min_p > 0).any()):
        weights.masked_fill_(weights < to.min_p.unsqueeze(1), 0.0)
    for row in (surplus > 0).nonzero().flatten().tolist():
        # Of the ids at the cut the lowest stay.
        tied = (logits[row] == at.least[row]).nonzero().flatten()
        weights[row, tied[len(tied) - int(surplus[row]) :]] = 0.0
