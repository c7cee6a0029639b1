"""What planning needs to know of a model: its description as the worker reads it, summed up."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from noria.models.config import DecoderConfig, ModelConfig
from noria.models.description import Description, describe
from noria.models.family import Layout, Parameter
from noria.models.kernels import kernel_weight_bytes
from noria.plan.kv import DTYPE_BYTES

_NAMES = {
    "embedding": "token embedding",
    "positions": "position embedding",
    "head": "output matrix",
}


@dataclass(frozen=True, slots=True)
class Count:
    """Some of the model's parameters: what they are, and how many."""

    words: str
    count: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer; counts unless a unit is given.

    parameters            all of them, in groups
    window                positions that a windowed layer sees; None: no layer has a window
    fp32_parameters       those of them that are fp32 whatever the dtype
    kernel_bytes          the weights as the CPU's own kernels hold them; None: not of their kind
    """

    family: str
    parameters: tuple[Count, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    window: int | None = None
    num_windowed_layers: int = 0
    fp32_parameters: int = 0
    kernel_bytes: int | None = None

    @property
    def num_parameters(self) -> int:
        return sum(part.count for part in self.parameters)

    def weight_bytes(self, dtype: str) -> int:
        """On torch, in that dtype."""
        itemsize = DTYPE_BYTES[dtype]
        return self.num_parameters * itemsize + self.fp32_parameters * (4 - itemsize)


def read_shape(path: Path) -> ModelShape:
    """Of a folder, a config.json or a GGUF file. Raises as `describe`."""
    return shape_of(describe(path))


def shape_of(described: Description) -> ModelShape:
    """Weights are not needed."""
    config, layout = described.config, described.layout
    window, windowed = _windows(config)
    decoder = config if isinstance(config, DecoderConfig) else None
    return ModelShape(
        family=config.architecture,
        parameters=tuple(_counts(layout)),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        window=window,
        num_windowed_layers=windowed,
        fp32_parameters=layout.sum(lambda p: p.size if p.from_one else 0),
        kernel_bytes=None if decoder is None else kernel_weight_bytes(decoder, layout),
    )


def _windows(config: ModelConfig) -> tuple[int | None, int]:
    """The window, and how many layers have it."""
    if not isinstance(config, DecoderConfig) or config.sliding_window is None:
        return None, 0
    windowed = config.num_layers - len(config.full_layers)
    return (config.sliding_window, windowed) if windowed else (None, 0)


def _counts(layout: Layout) -> Iterator[Count]:
    yield from map(_around, layout.before)
    yield _layers(layout)
    norm = sum(parameter.size for parameter in layout.after if parameter.name == "norm")
    if norm:
        yield Count("last norm", norm)
    yield from (_around(parameter) for parameter in layout.after if parameter.name != "norm")


def _around(parameter: Parameter) -> Count:
    name = _NAMES.get(parameter.name, parameter.name)
    return Count(f"{name} {' x '.join(f'{n:,}' for n in parameter.shape)}", parameter.size)


def _layers(layout: Layout) -> Count:
    sizes = {"attention": 0, "MLP": 0, "norms": 0}
    for parameter in layout.layer(0):
        sizes[_kind(parameter)] += parameter.size
    parts = " + ".join(f"{kind} {size:,}" for kind, size in sizes.items())
    return Count(f"{layout.num_layers} layers x ({parts})", layout.num_layers * sum(sizes.values()))


def _kind(parameter: Parameter) -> str:
    module = parameter.parts[0].name
    if "norm" in module or ".ln_" in module:
        return "norms"
    return "attention" if "attn" in module else "MLP"
