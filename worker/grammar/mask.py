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
    logits.index_copy_(0, rows, _masked(logits.index_select(0, rows), bits))


def _fill(bits: Bits, draw: Draw, matcher: Matcher) -> None:
    matcher.fill(bits)
    if draw.may_end:
        return
    unended = bits.copy()
    for token_id in draw.sampling.end_token_ids:
        unended[token_id // 32] &= ~np.int32(np.uint32(1 << token_id % 32).view(np.int32))
    if unended.any():
        bits[:] = unended


def _masked(logits: torch.Tensor, bits: Bits) -> torch.Tensor:
    """logits [R, vocab_size] where the bits of [R, num_words] are set, else -infinity."""
    vocab_size = logits.shape[1]
    unpacked = np.unpackbits(bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    allowed = torch.from_numpy(unpacked).view(torch.bool).to(logits.device)
    masked = torch.where(allowed, logits, -torch.inf)
    # Logits that are no numbers tell of damage wherever they stand.
    masked[~(logits < torch.inf).all(dim=1)] = torch.nan
    hopeless = masked.amax(dim=1) == -torch.inf
    if bool(hopeless.any()):
        rows = hopeless.nonzero().flatten()
        lowest = allowed[rows].int().argmax(dim=1)
        masked[rows, lowest] = torch.where(allowed[rows].any(dim=1), 0.0, torch.nan)
    return masked
