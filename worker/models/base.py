"""What a model family provides, and what the runner asks of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from noria.service.gguf_file import GGUFFile
from worker.attention.base import AttentionBackend, KVCacheSpec
from worker.models.config import DecoderConfig
from worker.models.fields import Fields

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
    """One tensor as the model uses it: its parts one after the other along the first axis.

    `from_one`: checkpoints hold its difference from one; the model uses the sum, in fp32.
    """

    name: str
    parts: tuple[Part, ...]
    from_one: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """How GGUF holds a tensor: under `name`, with `added` to every value.

    `interleaved_heads`: for how many heads its rows lie in llama.cpp's order of rotation,
    0 if they do not.
    """

    name: str
    interleaved_heads: int = 0
    added: float = 0.0


@dataclass(frozen=True, slots=True)
class HFFormat:
    """How Hugging Face's config.json describes a family, beyond what all have in common.

    `honoured` fields are read by `refine`; `neutral` are fields that are not, with the
    values that switch them off; `defaults` stand in for absent fields (not for null ones).
    """

    refine: Callable[[DecoderConfig, Fields], DecoderConfig]
    honoured: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GGUFFormat:
    """How GGUF metadata and tensors describe a family, beyond what all have in common."""

    tensor: Callable[[str, DecoderConfig], GGUFTensor]
    refine: Callable[[DecoderConfig, Fields, GGUFFile], DecoderConfig]
    honoured: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """All a loader has to know of a kind of model."""

    parameters: Callable[[DecoderConfig], list[Parameter]]
    build: Callable[[DecoderConfig, Mapping[str, torch.Tensor]], Model[AttentionBackend]]
    hf: HFFormat
    gguf: GGUFFormat
