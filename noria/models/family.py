"""What a model family is: its tensors, and how either kind of file describes it."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from noria.models.config import DecoderConfig
from noria.models.fields import Fields
from noria.service.gguf_file import GGUFFile


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

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """A model's tensors in order: those before its layers, of one layer, and after them.

    All layers hold tensors of the same shapes; `layer` gives those of the layer asked for.
    """

    before: tuple[Parameter, ...]
    layer: Callable[[int], tuple[Parameter, ...]]
    num_layers: int
    after: tuple[Parameter, ...]

    def all(self) -> list[Parameter]:
        """Every tensor. As long as the model has layers: check their number first."""
        layers = (p for index in range(self.num_layers) for p in self.layer(index))
        return [*self.before, *layers, *self.after]

    def sum(self, of: Callable[[Parameter], int]) -> int:
        """`of` summed over all tensors, in no time that grows with the layers."""
        around = sum(map(of, (*self.before, *self.after)))
        return around + self.num_layers * sum(map(of, self.layer(0)))


def weight_bytes(parameters: Iterable[Parameter], itemsize: int) -> int:
    """What tensors take as a model uses them, `itemsize` bytes a value."""
    return sum(p.size * (4 if p.from_one else itemsize) for p in parameters)


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


class LayoutOf(Protocol):
    """From a model's sizes to its tensors."""

    def __call__(self, config: DecoderConfig) -> Layout: ...


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """All there is to know of a kind of model but its arithmetic."""

    layout: LayoutOf
    hf: HFFormat
    gguf: GGUFFormat

    def parameters(self, config: DecoderConfig) -> list[Parameter]:
        """Every tensor of the model, in order."""
        return self.layout(config).all()
