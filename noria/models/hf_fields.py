"""What several families describe alike in Hugging Face's config.json."""

import math
from collections.abc import Mapping
from typing import Any

from noria.models.config import ConfigError
from noria.models.fields import Fields, refuse_unless_neutral
from noria.models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling

ROPE_FIELDS = frozenset(("rope_theta", "rope_scaling", "rope_parameters"))
FULL, SLIDING = "full_attention", "sliding_attention"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = (
    *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim"),
)
_USED = {"default": (), "linear": ("factor",), "llama3": _LLAMA3, "yarn": _YARN}


def hf_rope(fields: Fields, max_positions: int) -> Rope:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    name = "rope_parameters" if fields.object("rope_parameters") else "rope_scaling"
    if name == "rope_parameters" and fields.object("rope_scaling"):
        raise ConfigError(f"{fields.where}: both rope_parameters and rope_scaling are given")
    parameters = dict(fields.object(name))
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = fields.number("rope_theta", 10000.0)
    return parse_rope(fields.where, name, parameters, max_positions)


def parse_rope(where: str, name: str, parameters: Mapping[str, Any], max_positions: int) -> Rope:
    """One object with rope_theta, rope_type and what that type needs."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    refuse_unless_neutral(where, {f"{name}.rope_type": kind}, {f"{name}.rope_type": tuple(_USED)})
    used = {"rope_type", "type", "rope_theta", *_USED[kind]}
    others = {f"{name}.{k}": v for k, v in parameters.items() if k not in used}
    neutral = {f"{name}.partial_rotary_factor": (1.0,), f"{name}.truncate": (True,)}
    refuse_unless_neutral(where, others, neutral)
    fields = Fields(f"{where}: {name}", parameters)
    theta = fields.number("rope_theta")
    match kind:
        case "linear":
            return Rope(theta, LinearScaling(_positive(fields, "factor")))
        case "llama3":
            return Rope(theta, _llama3(fields, max_positions))
        case "yarn":
            return Rope(theta, _yarn(fields, theta, max_positions), _yarn_magnitude(fields))
    return Rope(theta)


def _llama3(fields: Fields, max_positions: int) -> Llama3Scaling:
    low, high = _positive(fields, "low_freq_factor"), _positive(fields, "high_freq_factor")
    if not low < high:
        raise ConfigError(
            f"{fields.where}.low_freq_factor {low} is not below high_freq_factor {high}"
        )
    return Llama3Scaling(_positive(fields, "factor"), low, high, _original(fields, max_positions))


def _yarn(fields: Fields, theta: float, max_positions: int) -> YarnScaling:
    if not theta > 1:
        raise ConfigError(f"{fields.where}: rope_theta is {theta}; yarn needs one above 1")
    return YarnScaling(
        _positive(fields, "factor"),
        _original(fields, max_positions),
        _positive(fields, "beta_fast", 32.0),
        _positive(fields, "beta_slow", 1.0),
    )


def _yarn_magnitude(fields: Fields) -> float:
    """As given, or by how much longer contexts flatten attention (YaRN, section 3.4)."""
    if fields.optional_number("attention_factor") is not None:
        return _positive(fields, "attention_factor")
    factor, numerator = fields.number("factor"), fields.number("mscale", 0.0)
    denominator = fields.number("mscale_all_dim", 0.0)
    if numerator and denominator:
        return yarn_magnitude(factor, numerator) / yarn_magnitude(factor, denominator)
    return yarn_magnitude(factor)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Of cosines and sines, so of queries and keys alike."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _original(fields: Fields, max_positions: int) -> int:
    name = "original_max_position_embeddings"
    value = fields.integer(name, max_positions)
    if value < 1:
        raise ConfigError(f"{fields.where}: {name} is {value}; at least 1 is needed")
    return value


def _positive(fields: Fields, name: str, default: float | None = None) -> float:
    value = fields.number(name, default)
    if not value > 0:
        raise ConfigError(f"{fields.where}: {name} is {value}; it must be above 0")
    return value


def layers_with_full_attention(fields: Fields, num_layers: int) -> frozenset[int] | None:
    """Those that `layer_types` names; None where there is no such field."""
    if fields.values.get("layer_types") is None:
        return None
    kinds = fields.words("layer_types", num_layers, (FULL, SLIDING))
    return frozenset(index for index, kind in enumerate(kinds) if kind == FULL)
