"""What is told of a chosen token: how likely it was, and which ids came next."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from worker.drawing import log_weights, rows_of
from worker.ranking import likeliest
from worker.sequence import Draw, SampledToken

# An id and its logit.
_Ranked = tuple[int, float]


def described(
    token_ids: Sequence[int], logits: torch.Tensor, draws: Sequence[Draw]
) -> list[SampledToken]:
    """The chosen ids with what their draws ask for; logits fp32 [S, vocab_size], adjusted.

    Log-probabilities are those of temperature 1. Probabilities of traced draws are at the
    request's temperature, a greedy one's at 1. Neither knows of filters.
    """
    tokens = [SampledToken(token_id) for token_id in token_ids]
    with_logprobs = [i for i, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    if with_logprobs:
        _add_logprobs(tokens, logits, draws, with_logprobs)
    traced = [i for i, draw in enumerate(draws) if draw.num_runners_up]
    if traced:
        _add_runners_up(tokens, logits, draws, traced)
    return tokens


def _add_logprobs(
    tokens: list[SampledToken], logits: torch.Tensor, draws: Sequence[Draw], rows: list[int]
) -> None:
    counts = [draws[row].sampling.logprobs or 0 for row in rows]
    chosen = [tokens[row].token_id for row in rows]
    told = _log_shares(rows_of(logits, rows), chosen, counts, [1.0] * len(rows))
    for row, (own, others) in zip(rows, told, strict=True):
        tokens[row] = replace(tokens[row], logprob=own, alternatives=others)


def _add_runners_up(
    tokens: list[SampledToken], logits: torch.Tensor, draws: Sequence[Draw], rows: list[int]
) -> None:
    counts = [draws[row].num_runners_up for row in rows]
    chosen = [tokens[row].token_id for row in rows]
    told = _log_shares(rows_of(logits, rows), chosen, counts, [_heat(draws[r]) for r in rows])
    for row, (own, others) in zip(rows, told, strict=True):
        runners_up = tuple((other, math.exp(share)) for other, share in others)
        possible = tuple(pair for pair in runners_up if pair[1] > 0)
        tokens[row] = replace(tokens[row], probability=math.exp(own), runners_up=possible)


def _heat(draw: Draw) -> float:
    return 1.0 if draw.sampling.is_greedy else draw.sampling.temperature


def _log_shares(
    logits: torch.Tensor, chosen: list[int], counts: list[int], temperatures: list[float]
) -> list[tuple[float, tuple[_Ranked, ...]]]:
    """Per row of logits [R, vocab_size]: the chosen id's natural log-probability at the
    temperature, and those of up to `counts` likeliest others; impossible ids are no others.
    """
    ids, values = likeliest(logits, 1 + max(counts))
    totals = log_weights(logits, torch.from_numpy(values[:, 0]), torch.tensor(temperatures))
    own = logits.gather(1, torch.tensor(chosen).unsqueeze(1))
    ranked = np.concatenate([own, values], axis=1).astype(np.float64)
    # Rows whose logits are no numbers are nobody's.
    with np.errstate(invalid="ignore"):
        shares = (ranked - values[:, :1]) / np.array(temperatures)[:, None] - totals.numpy()[
            :, None
        ]
    # Where nothing is likely, the total is as unlikely as each.
    shares[ranked == -np.inf] = -np.inf
    told = []
    for token_id, count, row_ids, row in zip(
        chosen, counts, ids.tolist(), shares.tolist(), strict=True
    ):
        pairs = zip(row_ids, row[1:], strict=True)
        others = [pair for pair in pairs if pair[0] != token_id and pair[1] > -math.inf]
        told.append((row[0], tuple(others[:count])))
    return told
