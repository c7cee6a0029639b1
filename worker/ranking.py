"""The likeliest ids of each row, in an order that depends on nothing but the row."""

import numpy as np
import numpy.typing as npt
import torch

from worker.narrowing import can_narrow, narrowed

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]


def likeliest(logits: torch.Tensor, count: int) -> tuple[Ids, Values]:
    """The `count` largest of each row of fp32 [R, vocab_size], or all: ids and values [R, n].

    Largest first, lower ids first among equal ones.
    """
    vocab_size = logits.shape[1]
    count = min(count, vocab_size)
    # One more than asked for shows whether others are as large as the last.
    values, ids = _largest(logits, min(count + 1, vocab_size))
    order = np.lexsort((ids, -values), axis=-1)[:, :count]
    crowded = values[:, count - 1] == values[:, -1] if count < vocab_size else []
    ids = np.take_along_axis(ids, order, axis=1)
    values = np.take_along_axis(values, order, axis=1)
    for row in np.flatnonzero(crowded):
        ids[row] = _lowest_ties(logits[row], values[row])
    return ids, values


def _largest(logits: torch.Tensor, count: int) -> tuple[Values, Ids]:
    if not can_narrow(logits.shape[1], count):
        values, ids = logits.topk(count, dim=-1)
        return values.numpy(), ids.numpy()
    near = narrowed(logits, count)
    values, places = near.values.topk(count, dim=-1)
    return values.numpy(), near.ids.gather(1, places).numpy()


def _lowest_ties(logits: torch.Tensor, values: Values) -> Ids:
    """The ids of the given largest values, where more ids are as likely as the last of them."""
    ids = (logits >= float(values[-1])).nonzero().flatten()
    order = torch.argsort(logits[ids], descending=True, stable=True)
    return ids[order[: len(values)]].numpy()
