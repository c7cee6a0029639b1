"""What changes logits before a token is chosen, in this order:

1. `logit_bias` is added.
2. The repetition penalty divides positive logits of ids that prompt or output hold, and
   multiplies negative ones (Keskar et al. 2019, "CTRL").
3. The frequency penalty is subtracted once per occurrence in the output, the presence
   penalty once for each id that occurs there. The prompt does not count.
4. Before `min_tokens` outputs, ids that would end the sequence get -infinity.
5. So does what the output's grammar does not allow (`grammar.mask`).

Rows without controls are not touched. Every value depends on its own row alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker.grammar.mask import keep_allowed
from worker.sequence import Draw
from worker.token_counts import TokenCounts

_GREATEST = torch.finfo(torch.float32).max


# Puts an array where the logits are.
Upload = Callable[[npt.NDArray[Any]], torch.Tensor]


def adjust(logits: torch.Tensor, draws: Sequence[Draw], upload: Upload = torch.from_numpy) -> None:
    """logits fp32 [S, vocab_size], one draw per row; changed in place."""
    _add_bias(logits, draws, upload)
    _penalise(logits, draws, upload)
    _bar_ends(logits, draws, upload)
    keep_allowed(logits, draws, upload)


def _add_bias(logits: torch.Tensor, draws: Sequence[Draw], upload: Upload) -> None:
    biases = [(row, d.sampling.logit_bias) for row, d in enumerate(draws) if d.sampling.logit_bias]
    if biases:
        rows = np.repeat([row for row, _ in biases], [len(bias.ids) for _, bias in biases])
        at = upload(rows), upload(np.concatenate([bias.ids for _, bias in biases]))
        logits[at] += upload(np.concatenate([bias.values for _, bias in biases]))


def _penalise(logits: torch.Tensor, draws: Sequence[Draw], upload: Upload) -> None:
    penalised = [
        (row, draw, draw.token_counts)
        for row, draw in enumerate(draws)
        if draw.token_counts is not None
    ]
    if penalised:
        _penalise_rows(logits, penalised, upload)


def _penalise_rows(
    logits: torch.Tensor, rows: Sequence[tuple[int, Draw, TokenCounts]], upload: Upload
) -> None:
    """All distinct ids of all histories at once, one after the other: [sum of D]."""
    sizes = [len(counts.ids) for _, _, counts in rows]

    def spread(value_of: Callable[[Draw], float]) -> torch.Tensor:
        values = np.array([value_of(draw) for _, draw, _ in rows], np.float32)
        return upload(np.repeat(values, sizes))

    at = (
        upload(np.repeat([row for row, _, _ in rows], sizes)),
        upload(np.concatenate([counts.ids for _, _, counts in rows])),
    )
    occurrences = upload(np.concatenate([counts.output_counts for *_, counts in rows]))
    values = _repeated(logits[at], spread(lambda draw: draw.sampling.repetition_penalty))
    values -= spread(lambda draw: draw.sampling.frequency_penalty) * occurrences
    values -= spread(lambda draw: draw.sampling.presence_penalty) * (occurrences > 0)
    logits[at] = values


def _repeated(logits: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    scaled = torch.where(logits > 0, logits / penalties, logits * penalties)
    # A quotient beyond fp32 is still the likeliest id; infinity is kept for faulty logits.
    return torch.where(logits.isfinite(), scaled.clamp(-_GREATEST, _GREATEST), logits)


def _bar_ends(logits: torch.Tensor, draws: Sequence[Draw], upload: Upload) -> None:
    barred = [
        (row, token_id)
        for row, draw in enumerate(draws)
        if not (draw.may_end or draw.matcher)
        for token_id in draw.sampling.end_token_ids
    ]
    if barred:
        rows, ids = upload(np.array(barred)).unbind(1)
        logits.index_put_((rows, ids), logits.new_full((), -torch.inf))
