"""Choose one token per row of logits, by an address instead of a random state.

Greedy is the largest logit. Otherwise a draw is the inverse of the cumulative weights at
one uniform number that is a function of (seed, choice, output index) alone: ids in
ascending order, and filters do nothing but set weights to zero. So a draw does not depend
on the rest of the batch, nor on which filters left the same candidates.

In this order: what changes logits (`logit_controls`), temperature, filters (`filters`).
"""

from collections.abc import Sequence

import numpy as np
import torch

from worker.alternatives import described
from worker.filters import exclude, rows_of
from worker.logit_controls import adjust
from worker.philox import uniforms
from worker.sequence import Draw, SampledToken


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken | None]:
    """logits fp32 [S, vocab_size], one draw per row; `logits` is changed in place.

    None for a row with NaN or +infinity in it, which touches no other row.
    """
    adjust(logits, draws)
    greatest, ids = logits.max(dim=-1)
    faulty = (greatest.isnan() | (greatest == torch.inf)).tolist()
    sampled = [
        row for row, draw in enumerate(draws) if not (draw.sampling.is_greedy or faulty[row])
    ]
    if sampled:
        chosen = [draws[row] for row in sampled]
        ids[sampled] = _draw(rows_of(logits, sampled), greatest[sampled], chosen)
    if bool((greatest == -torch.inf).any()):
        _choose_unbarred(greatest, ids, draws)
    tokens = described(ids.tolist(), logits, draws)
    return [None if fault else token for fault, token in zip(faulty, tokens, strict=True)]


def _choose_unbarred(greatest: torch.Tensor, ids: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Where every likelihood is zero: the lowest id that is not barred."""
    for row in (greatest == -torch.inf).nonzero().flatten().tolist():
        barred = frozenset() if draws[row].may_end else draws[row].sampling.end_token_ids
        ids[row] = next(token_id for token_id in range(len(barred) + 1) if token_id not in barred)


def _draw(logits: torch.Tensor, greatest: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Ids int64 [R], one per row of logits [R, vocab_size] with maxima `greatest` [R].

    The first id whose cumulative weight exceeds u * total has a weight above zero, and it
    exists: u is at most 1 - 2^-24, and an fp32 total times that rounds to below the total.
    """
    temperatures = torch.tensor([draw.sampling.temperature for draw in draws])
    weights = (logits - greatest.unsqueeze(1)).div_(temperatures.unsqueeze(1)).exp_()
    exclude(logits, weights, draws)
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
