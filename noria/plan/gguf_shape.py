"""A GGUF file's header as a ModelShape."""

import math
from pathlib import Path

from noria.plan.shape import Count, ModelShape, ShapeError, Values
from noria.service.gguf_file import GGUFFile, read_gguf

_KNOWN = ("llama", "qwen2", "qwen3", "gemma3", "gpt2")
# Constants that some files carry as a tensor.
_NO_PARAMETERS = ("rope_freqs.weight",)
_EMBEDDING = "token_embd.weight"
_GEMMA3_PATTERN = 6


def gguf_shape(path: Path) -> ModelShape:
    """Reads the header alone. Raises ShapeError, GGUFError (both ValueError), OSError."""
    file = read_gguf(path)
    family = file.metadata["general.architecture"]
    if family not in _KNOWN:
        known = ", ".join(_KNOWN)
        raise ShapeError(f"{path}: general.architecture = {family!r} is not known (known: {known})")
    values = Values(f"{path}: {family}", _of_architecture(file, family))
    hidden, heads = values.count("embedding_length"), values.count("attention.head_count")
    layers = values.count("block_count")
    window, windowed = _window(family, values, layers)
    return ModelShape(
        family=family,
        parameters=_parameters(file),
        vocab_size=values.count("vocab_size", _embedding_rows(file)),
        hidden_size=hidden,
        intermediate_size=values.count("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=values.count("attention.head_count_kv", heads),
        head_dim=values.count("attention.key_length", hidden // heads),
        max_position_embeddings=values.count("context_length"),
        window=window,
        num_windowed_layers=windowed,
    )


def _of_architecture(file: GGUFFile, family: str) -> dict[str, object]:
    prefix = f"{family}."
    return {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}


def _parameters(file: GGUFFile) -> tuple[Count, ...]:
    sizes = {n: math.prod(t.shape) for n, t in file.tensors.items() if n not in _NO_PARAMETERS}
    if not sizes:
        raise ShapeError(f"{file.path}: the file has no tensors")
    layers = sum(size for name, size in sizes.items() if name.startswith("blk."))
    return (
        Count("tensors of the layers, dequantised", layers),
        Count("tensors around them", sum(sizes.values()) - layers),
    )


def _embedding_rows(file: GGUFFile) -> int | None:
    info = file.tensors.get(_EMBEDDING)
    return info.shape[0] if info is not None and info.shape else None


def _window(family: str, values: Values, layers: int) -> tuple[int | None, int]:
    """Gemma 3 gives every sixth layer the whole context; elsewhere a window holds for all."""
    if not values.get("attention.sliding_window"):
        return None, 0
    window = values.count("attention.sliding_window")
    full = layers // _GEMMA3_PATTERN if family == "gemma3" else 0
    return window, layers - full
