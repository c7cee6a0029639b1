"""What is told of chosen tokens beside their ids, computed on the device, read when collected."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from worker.device.link import Link
from worker.filters import weights_of
from worker.sequence import Draw, SampledToken


@dataclass(frozen=True, slots=True)
class Shares:
    """Natural log-probabilities of some rows, on their way to the host.

    ids int64 [R, n] and logs fp32 [R, n]: the likeliest, lowest ids first among equal ones;
    own fp32 [R] is the chosen token's.
    """

    rows: list[int]
    ids: torch.Tensor
    logs: torch.Tensor
    own: torch.Tensor


def shares(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    rows: list[int],
    temperatures: list[float],
    count: int,
    link: Link,
) -> Shares:
    """Of `rows` of logits fp32 [S, vocab_size] with chosen ids [S]: their `count` likeliest."""
    at = link.upload(np.array(rows))
    temperature = link.upload(np.array(temperatures, np.float32))
    logits, chosen = logits.index_select(0, at), chosen.index_select(0, at)
    greatest = logits.amax(dim=-1)
    total = weights_of(logits, greatest, temperature).cumsum(dim=-1)[:, -1].log()
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    count = min(count, logits.shape[1])
    own = logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
    logs = torch.cat([values[:, :count], own.unsqueeze(1)], dim=1)
    logs = (logs - greatest.unsqueeze(1)) / temperature.unsqueeze(1) - total.unsqueeze(1)
    # Where nothing is likely, the total is as unlikely as each.
    logs = torch.where(logs.isnan(), -torch.inf, logs)
    return Shares(
        rows, link.download(ids[:, :count]), link.download(logs[:, :-1]), link.download(logs[:, -1])
    )


@dataclass(frozen=True, slots=True)
class Told:
    """What draws ask for beside ids; None where none does."""

    logprobs: Shares | None
    traced: Shares | None


def told(logits: torch.Tensor, chosen: torch.Tensor, draws: Sequence[Draw], link: Link) -> Told:
    """Log-probabilities at temperature 1; probabilities of traced draws at the request's."""
    asked = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    traced = [row for row, draw in enumerate(draws) if draw.num_runners_up]
    logprobs = runners_up = None
    if asked:
        most = 1 + max(draws[row].sampling.logprobs or 0 for row in asked)
        logprobs = shares(logits, chosen, asked, [1.0] * len(asked), most, link)
    if traced:
        most = 1 + max(draws[row].num_runners_up for row in traced)
        heats = [_heat(draws[row]) for row in traced]
        runners_up = shares(logits, chosen, traced, heats, most, link)
    return Told(logprobs, runners_up)


def described(ids: list[int], draws: Sequence[Draw], told: Told) -> list[SampledToken]:
    """The tokens, once what is told of them has come to the host."""
    tokens = [SampledToken(token_id) for token_id in ids]
    for row, own, others in _rows(told.logprobs):
        left = _without(ids[row], others)[: draws[row].sampling.logprobs or 0]
        tokens[row] = replace(tokens[row], logprob=own, alternatives=left)
    for row, own, others in _rows(told.traced):
        left = _without(ids[row], others)[: draws[row].num_runners_up]
        likely = tuple((i, math.exp(log)) for i, log in left if math.exp(log) > 0)
        tokens[row] = replace(tokens[row], probability=math.exp(own), runners_up=likely)
    return tokens


def _rows(shares: Shares | None) -> list[tuple[int, float, list[tuple[int, float]]]]:
    if shares is None:
        return []
    pairs = [
        list(zip(ids, logs, strict=True))
        for ids, logs in zip(shares.ids.tolist(), shares.logs.tolist(), strict=True)
    ]
    return list(zip(shares.rows, shares.own.tolist(), pairs, strict=True))


def _without(chosen: int, others: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Others than the chosen one, as far as they are possible."""
    return tuple((i, log) for i, log in others if i != chosen and log > -math.inf)


def _heat(draw: Draw) -> float:
    return 1.0 if draw.sampling.is_greedy else draw.sampling.temperature
