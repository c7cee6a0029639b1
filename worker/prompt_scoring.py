"""How likely each token of a prompt is after what precedes it, from the hidden states there."""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch

from worker.ranking import likeliest
from worker.scores import PromptLogprobs
from worker.sequence import SchedulerOutput, Scoring

# Logits of a long chunk are never there at once: so many rows of a vocabulary of 262,144 ids
# are 64 MiB.
_ROWS = 64


def scored_prompts(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    output: SchedulerOutput,
    starts: Sequence[int],
) -> dict[int, PromptLogprobs]:
    """hidden [T, hidden_size] of a step, whose sequences begin at `starts`: what is told of
    those that are asked, without any whose logits are no numbers.
    """
    scores = {}
    for start, entry in zip(starts, output.scheduled, strict=False):
        if entry.scoring is not None:
            told = scored(logits_of, hidden[start:], entry.scoring)
            if told is not None:
                scores[entry.sequence_id] = told
    return scores


def scored(
    logits_of: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, scoring: Scoring
) -> PromptLogprobs | None:
    """hidden [n, hidden_size] of a sequence's part of a step; None where logits are no numbers.

    `logits_of` turns hidden states [S, hidden_size] into fp32 [S, vocab_size]. What changes
    logits before a token is chosen does not count here.
    """
    parts = []
    for first in range(0, len(scoring.next_token_ids), _ROWS):
        next_ids = torch.tensor(scoring.next_token_ids[first : first + _ROWS])
        start = scoring.first_row + first
        logits = logits_of(hidden[start : start + len(next_ids)])
        part = _of_rows(logits, next_ids, scoring.num_alternatives)
        if part is None:
            return None
        parts.append(part)
    return _joined(parts)


def _of_rows(
    logits: torch.Tensor, next_ids: torch.Tensor, num_alternatives: int
) -> PromptLogprobs | None:
    """logits [R, vocab_size], next_ids int64 [R]."""
    totals = logits.logsumexp(dim=-1)
    if bool((totals.isnan() | (totals == torch.inf)).any()):
        return None
    own = logits.gather(1, next_ids.unsqueeze(1)).squeeze(1)
    # Where nothing is likely, the total is as unlikely as each.
    own = own.where(own == -torch.inf, own - totals)
    if not num_alternatives:
        return PromptLogprobs(own.tolist(), [0] * len(next_ids), [], [])
    ids, values = likeliest(logits, num_alternatives + 1)
    told = (ids != next_ids.unsqueeze(1).numpy()) & (values > -np.inf)
    told &= told.cumsum(axis=1) <= num_alternatives
    counts = told.sum(axis=1)
    shares = values[told] - totals.numpy().repeat(counts)
    return PromptLogprobs(own.tolist(), counts.tolist(), ids[told].tolist(), shares.tolist())


def _joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    return PromptLogprobs(
        list(chain.from_iterable(part.logprobs for part in parts)),
        list(chain.from_iterable(part.num_alternatives for part in parts)),
        list(chain.from_iterable(part.alternative_ids for part in parts)),
        list(chain.from_iterable(part.alternative_logprobs for part in parts)),
    )
