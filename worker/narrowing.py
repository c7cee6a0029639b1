"""The few largest of many values, without ordering them: by the maxima of blocks.

The n largest values of a row lie in the n blocks with the largest maxima. Finding the
maxima is one pass at the speed of memory; whatever follows looks at those blocks alone.
"""

from dataclasses import dataclass

import numpy as np
import torch

_BLOCK = 32
# Below so many blocks for each that is wanted there is little to gain.
_LEAST_SHARE = 2


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Some of each row's values, by ascending id: `values` fp32 and `ids` int64 [R, C].

    All that are greater than `bound` [R] are there. `largest` [R, n] has the greatest of
    all, largest first.
    """

    values: torch.Tensor
    ids: torch.Tensor
    bound: torch.Tensor
    largest: torch.Tensor


def can_narrow(vocab_size: int, count: int) -> bool:
    """Whether rows are so long that narrowing them to their `count` largest pays."""
    return vocab_size // _BLOCK >= _LEAST_SHARE * (count + 1)


def narrowed(rows: torch.Tensor, count: int) -> Narrowed:
    """The blocks of fp32 [R, vocab_size] that hold each row's `count` largest values."""
    num_blocks = rows.shape[1] // _BLOCK
    blocks = rows[:, : num_blocks * _BLOCK].view(len(rows), num_blocks, _BLOCK)
    maxima, places = blocks.amax(dim=-1).topk(count + 1, dim=-1)
    places = places[:, :count].sort(dim=-1).values
    of_blocks = blocks[torch.arange(len(rows)).unsqueeze(1), places].flatten(1)
    ids = (places.unsqueeze(2) * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    # What does not fill a block stands at the end of every row.
    rest = torch.arange(num_blocks * _BLOCK, rows.shape[1])
    values = torch.cat([of_blocks, rows[:, num_blocks * _BLOCK :]], dim=1)
    ids = torch.cat([ids, rest.expand(len(rows), -1)], dim=1)
    return Narrowed(values, ids, maxima[:, count], largest(values, count))


def whole(rows: torch.Tensor) -> Narrowed:
    """All of rows that are too short to be narrowed."""
    ids = torch.arange(rows.shape[1]).expand(len(rows), -1)
    bound = torch.full((len(rows),), -torch.inf)
    return Narrowed(rows, ids, bound, largest(rows, rows.shape[1]))


def largest(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest values of each row, largest first: [R, count]."""
    values = rows.numpy()
    if count < values.shape[1]:
        values = np.partition(values, values.shape[1] - count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())
