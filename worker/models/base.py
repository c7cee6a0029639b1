"""What the runner asks of a model."""

from typing import Protocol, TypeVar

import torch

from worker.attention.base import AttentionBackend, KVCacheSpec

Backend = TypeVar("Backend", bound=AttentionBackend, contravariant=True)


class Model(Protocol[Backend]):
    """A decoder over packed positions: T of them, from any number of sequences."""

    @property
    def kv_spec(self) -> KVCacheSpec: ...

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Backend
    ) -> torch.Tensor:
        """token_ids and positions int64 [T] -> hidden [T, hidden_size].

        `attention` has planned this very batch.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden_size] -> fp32 [S, vocab_size]; only for positions that are sampled."""
        ...
