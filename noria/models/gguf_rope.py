"""Rotary embedding as GGUF metadata describe it."""

import math
import struct

from noria.models.config import ConfigError, DecoderConfig
from noria.models.fields import Fields, refuse_unless_neutral
from noria.models.hf_fields import yarn_magnitude
from noria.models.rope import FactorScaling, LinearScaling, Rope, YarnScaling
from noria.service.gguf_file import GGUFFile

_ORIGINAL = "rope.scaling.original_context_length"
ROPE_KEYS = frozenset(("rope.freq_base", "rope.scaling.type", "rope.scaling.factor", _ORIGINAL))
# fp32 [head_dim / 2]: by what each frequency is divided (Llama 3.1 and later).
ROPE_FACTORS = "rope_freqs.weight"


def gguf_rope(
    fields: Fields, file: GGUFFile, config: DecoderConfig, default_theta: float = 10000.0
) -> Rope:
    """As llama.cpp reads it. Raises ConfigError naming the key."""
    theta = fields.number("rope.freq_base", default_theta)
    scaling = _scaling(fields, file, config.max_position_embeddings)
    if ROPE_FACTORS not in file.tensors:
        if not isinstance(scaling, YarnScaling):
            return Rope(theta, scaling)
        if not theta > 1:
            raise ConfigError(f"{fields.where}: rope.freq_base is {theta}; yarn needs one above 1")
        return Rope(theta, scaling, yarn_magnitude(scaling.factor))
    if scaling is not None:
        raise ConfigError(
            f"{fields.where}: rope.scaling.factor = {scaling.factor} beside {ROPE_FACTORS} is"
            " not supported"
        )
    return Rope(theta, FactorScaling(_factors(file, config.head_dim)))


def _scaling(fields: Fields, file: GGUFFile, longest: int) -> LinearScaling | YarnScaling | None:
    """Of a file without a scaling type llama.cpp takes the factor as a linear one."""
    kind = fields.values.get("rope.scaling.type")
    name = f"{file.metadata['general.architecture']}.rope.scaling.type"
    refuse_unless_neutral(str(file.path), {name: kind}, {name: ("none", "linear", "yarn")})
    factor = 1.0 if kind == "none" else fields.number("rope.scaling.factor", 1.0)
    if factor in (0.0, 1.0):
        return None
    if not factor > 0:
        raise ConfigError(f"{fields.where}: rope.scaling.factor is {factor}; it must be above 0")
    if kind != "yarn":
        return LinearScaling(factor)
    original = fields.integer(_ORIGINAL, longest)
    if original < 1:
        raise ConfigError(f"{fields.where}: {_ORIGINAL} is {original}; at least 1 is needed")
    return YarnScaling(factor, original)


def _factors(file: GGUFFile, head_dim: int) -> tuple[float, ...]:
    info, count = file.tensors[ROPE_FACTORS], head_dim // 2
    if info.shape != (count,) or info.ggml_type != 0:
        raise ConfigError(
            f"{file.path}: {ROPE_FACTORS} is {info.shape} of type {info.ggml_type};"
            f" ({count},) of type 0 (F32) is needed"
        )
    if info.offset + 4 * count > len(file.data):
        raise ConfigError(f"{file.path}: {ROPE_FACTORS} lies beyond the end of the file")
    factors: tuple[float, ...] = struct.unpack_from(f"<{count}f", file.data, info.offset)
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ConfigError(f"{file.path}: {ROPE_FACTORS} holds factors that are not above 0")
    return factors
