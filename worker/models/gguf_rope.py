"""Rotary embedding as GGUF metadata describe it."""

import numpy as np

from noria.service.gguf_file import GGUFFile
from worker.models.config import ConfigError
from worker.models.fields import Fields, refuse_unless_neutral
from worker.models.rope import FactorScaling, LinearScaling, Rope

ROPE_KEYS = frozenset(("rope.freq_base", "rope.scaling.type", "rope.scaling.factor"))
# fp32 [head_dim / 2]: by what each frequency is divided (Llama 3.1 and later).
ROPE_FACTORS = "rope_freqs.weight"


def gguf_rope(
    fields: Fields, file: GGUFFile, head_dim: int, default_theta: float = 10000.0
) -> Rope:
    """Of a file without a scaling type llama.cpp takes the factor as a linear one."""
    theta = fields.number("rope.freq_base", default_theta)
    kind = fields.values.get("rope.scaling.type")
    name = f"{file.metadata['general.architecture']}.rope.scaling.type"
    refuse_unless_neutral(str(file.path), {name: kind}, {name: ("none", "linear")})
    factor = 1.0 if kind == "none" else fields.number("rope.scaling.factor", 1.0)
    linear = None if factor in (0.0, 1.0) else LinearScaling(factor)
    if ROPE_FACTORS not in file.tensors:
        return Rope(theta, linear)
    if linear is not None:
        raise ConfigError(
            f"{fields.where}: rope.scaling.factor = {factor} beside {ROPE_FACTORS} is not supported"
        )
    return Rope(theta, FactorScaling(_factors(file, head_dim)))


def _factors(file: GGUFFile, head_dim: int) -> tuple[float, ...]:
    info, count = file.tensors[ROPE_FACTORS], head_dim // 2
    if info.shape != (count,) or info.ggml_type != 0:
        raise ConfigError(
            f"{file.path}: {ROPE_FACTORS} is {info.shape} of type {info.ggml_type};"
            f" ({count},) of type 0 (F32) is needed"
        )
    if info.offset + 4 * count > len(file.data):
        raise ConfigError(f"{file.path}: {ROPE_FACTORS} lies beyond the end of the file")
    factors = np.frombuffer(file.data, "<f4", count, info.offset)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ConfigError(f"{file.path}: {ROPE_FACTORS} holds factors that are not above 0")
    return tuple(factors.tolist())
