"""What grammars allow, applied to the logits of their rows.

All rows that have a grammar are masked in one operation; the others are not touched.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker.grammar.matcher import Bits, Matcher, num_words
from worker.sequence import Draw


def keep_allowed(
    logits: torch.Tensor,
    draws: Sequence[Draw],
    upload: Callable[[npt.NDArray[Any]], torch.Tensor] = torch.from_numpy,
) -> None:
    """logits fp32 [S, vocab_size], one draw per row; changed in place.

    What a row's grammar does not allow becomes -infinity, and before `min_tokens` also what
    would end the output, unless the grammar allows nothing else. Where the model holds all of
    the rest impossible, the lowest id of it is chosen. A row whose grammar has a problem
    becomes NaN: nothing can be drawn from it.
    """
    matched = [(row, draw, draw.matcher) for row, draw in enumerate(draws) if draw.matcher]
    if not matched:
        return
    bits = np.zeros((len(matched), num_words(logits.shape[1])), np.int32)
    for own, (_, draw, matcher) in zip(bits, matched, strict=True):
        _fill(own, draw, matcher)
    unpacked = np.unpackbits(bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    rows, allowed = upload(np.array([row for row, _, _ in matched])), upload(unpacked)
    # 0 where allowed, else -infinity: an addition is many times faster than a choice.
    logits.index_add_(0, rows, allowed.to(logits.dtype).reciprocal_().neg_().add_(1))
    lowest = unpacked.argmax(axis=1)
    resort = np.where(np.take_along_axis(unpacked, lowest[:, None], 1)[:, 0], 0.0, np.nan)
    _mend(logits, rows, upload(lowest), upload(resort.astype(np.float32)))


def _fill(bits: Bits, draw: Draw, matcher: Matcher) -> None:
    matcher.fill(bits)
    if draw.may_end:
        return
    unended = bits.copy()
    for token_id in draw.sampling.end_token_ids:
        unended[token_id // 32] &= ~np.int32(np.uint32(1 << token_id % 32).view(np.int32))
    if unended.any():
        bits[:] = unended


def _mend(
    logits: torch.Tensor, rows: torch.Tensor, lowest: torch.Tensor, resort: torch.Tensor
) -> None:
    """Rows that are not all numbers become such that none is greatest.

    Where nothing is likely, the logit of the `lowest` allowed id becomes `resort`. All [R].
    """
    # Logits that are no numbers tell of damage wherever they stand: the sum keeps them so.
    highest = logits.amax(dim=1).index_select(0, rows)
    own = torch.where(highest == -torch.inf, resort, logits[rows, lowest])
    logits.index_put_((rows, lowest), torch.where(highest < torch.inf, own, torch.nan))
