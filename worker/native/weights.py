"""Weights as the kernels read them; see source/linear.h."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from noria.models.kernels import LANES, UNIT


class Arena:
    """One block of bf16 memory that weights are packed into, in the order of their use."""

    def __init__(self, num_elements: int, prepare: Callable[[torch.Tensor], None]) -> None:
        """`prepare` gets the memory before anything is written. Raises RuntimeError for lack."""
        self._memory = torch.empty(num_elements, dtype=torch.bfloat16)
        prepare(self._memory)
        self._used = 0

    @property
    def num_bytes(self) -> int:
        return self._memory.numel() * self._memory.itemsize

    def pack(self, *weights: torch.Tensor) -> torch.Tensor:
        """Weights [n, k] of one linear as panels [n / 16, k / 2, 16, 2], zeros up to whole units.

        Two weights of the same shape take turns, a panel of one and a panel of the other.
        """
        panels = [_panels(weight) for weight in weights]
        shape = (len(panels[0]) * len(panels), *panels[0].shape[1:])
        packed = self._take(shape)
        for index, panel in enumerate(panels):
            packed[index :: len(panels)].copy_(panel)
        return packed

    def _take(self, shape: tuple[int, ...]) -> torch.Tensor:
        count = torch.Size(shape).numel()
        piece = self._memory[self._used : self._used + count]
        self._used += count
        return piece.view(shape)


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """A view [n / 16, k / 2, 16, 2]; a copy where rows must be added."""
    n, k = weight.shape
    padded = F.pad(weight, (0, 0, 0, -n % UNIT)) if n % UNIT else weight
    return padded.view(-1, LANES, k // 2, 2).permute(0, 2, 1, 3)
