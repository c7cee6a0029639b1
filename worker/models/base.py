"""What a model family provides, and what the runner asks of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from worker.attention.base import AttentionBackend, KVCacheSpec
from worker.models.config import ModelConfig

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


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor as checkpoints hold it, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor as the model uses it: its parts one after the other along the first axis."""

    name: str
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """All a loader has to know of a kind of model.

    `gguf_name` maps a Hugging Face name to GGUF's. `gguf_interleaved_heads` gives, for a
    tensor whose rows GGUF stores in interleaved-rotation order, its number of heads, else 0.
    """

    parameters: Callable[[ModelConfig], list[Parameter]]
    build: Callable[[ModelConfig, Mapping[str, torch.Tensor]], Model[AttentionBackend]]
    gguf_name: Callable[[str], str]
    gguf_interleaved_heads: Callable[[str, ModelConfig], int]
