"""What grammars allow, applied to the logits of their rows.

All rows that have a grammar are masked in one operation; the others are not touched.
"""

from collections.abc import Sequence

import numpy as np
import torch

from worker.grammar.matcher import Bits, Matcher, num_words
from worker.sequence import Draw


def keep_allowed(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
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
    rows = torch.tensor([row for row, _, _ in matched], device=logits.device)
    allowed = _unpacked(bits, logits)
    # 0 where allowed, else -infinity: an addition is many times faster than a choice.
    logits.index_add_(0, rows, allowed.to(logits.dtype).reciprocal_().neg_().add_(1))
    _mend(logits, rows, allowed)


def _fill(bits: Bits, draw: Draw, matcher: Matcher) -> None:
    matcher.fill(bits)
    if draw.may_end:
        return
    unended = bits.copy()
    for token_id in draw.sampling.end_token_ids:
        unended[token_id // 32] &= ~np.int32(np.uint32(1 << token_id % 32).view(np.int32))
    if unended.any():
        bits[:] = unended


def _unpacked(bits: Bits, logits: torch.Tensor) -> torch.Tensor:
    """uint8 [R, vocab_size] from the bits of [R, num_words], on the logits' device."""
    unpacked = np.unpackbits(bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    return torch.from_numpy(unpacked).to(logits.device)


def _mend(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """Rows without a number become NaN; so do those where nothing is allowed."""
    highest = logits.amax(dim=1)[rows]
    # Logits that are no numbers tell of damage wherever they stand: the sum keeps them so.
    logits[rows[~(highest < torch.inf)]] = torch.nan
    hopeless = highest == -torch.inf
    if bool(hopeless.any()):
        own = allowed[hopeless].bool()
        lowest = own.int().argmax(dim=1)
        logits[rows[hopeless], lowest] = torch.where(own.any(dim=1), 0.0, torch.nan)
