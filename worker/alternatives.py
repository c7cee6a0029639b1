"""What is told of a chosen token: how likely it was, and which ids came next."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from worker.filters import rows_of
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
    likeliest = _likeliest(logits, 1 + max(counts))
    greatest = logits.amax(dim=-1, keepdim=True)
    heat = torch.tensor(temperatures).unsqueeze(1)
    totals = ((logits - greatest) / heat).logsumexp(dim=-1).tolist()
    own = logits.gather(1, torch.tensor(chosen).unsqueeze(1)).flatten().tolist()
    tops = greatest.flatten().tolist()

    def share(row: int, logit: float) -> float:
        # Where nothing is likely, the total is as unlikely as each.
        scaled: float = (logit - tops[row]) / temperatures[row]
        return logit if logit == -math.inf else scaled - totals[row]

    told = []
    for row, token_id in enumerate(chosen):
        possible = [(i, x) for i, x in likeliest[row] if i != token_id and x > -math.inf]
        others = tuple((i, share(row, x)) for i, x in possible[: counts[row]])
        told.append((share(row, own[row]), others))
    return told


def _likeliest(logits: torch.Tensor, count: int) -> list[list[_Ranked]]:
    """Each row's `count` largest, largest first, lower ids first among equal ones."""
    count = min(count, logits.shape[1])
    values, ids = logits.topk(count, dim=-1)
    crowded = ((logits >= values[:, -1:]).sum(dim=-1) > count).tolist()
    ranked = []
    for row, pairs in enumerate(zip(ids.tolist(), values.tolist(), strict=True)):
        by_rank = sorted(zip(*pairs, strict=True), key=lambda pair: (-pair[1], pair[0]))
        ranked.append(_lowest_ties(logits[row], count) if crowded[row] else by_rank)
    return ranked


def _lowest_ties(logits: torch.Tensor, count: int) -> list[_Ranked]:
    """As `_likeliest`, for one row in which more ids are as likely as the last of them."""
    least = logits.topk(count).values[-1]
    ids = (logits >= least).nonzero().flatten()
    order = torch.argsort(logits[ids], descending=True, stable=True)[:count]
    return list(zip(ids[order].tolist(), logits[ids][order].tolist(), strict=True))
