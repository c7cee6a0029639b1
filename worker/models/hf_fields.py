"""What several families describe alike in Hugging Face's config.json."""

from collections.abc import Mapping
from typing import Any

from worker.models.config import ConfigError
from worker.models.fields import Fields, refuse_unless_neutral
from worker.models.rope import LinearScaling, Llama3Scaling, Rope

ROPE_FIELDS = frozenset(("rope_theta", "rope_scaling", "rope_parameters"))
FULL, SLIDING = "full_attention", "sliding_attention"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_USED = {"default": (), "linear": ("factor",), "llama3": _LLAMA3}


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
    used = {"rope_type", "type", "rope_theta", *_USED.get(kind, ())}
    others = {f"{name}.{k}": v for k, v in parameters.items() if k not in used}
    supported = {f"{name}.rope_type": tuple(_USED)}
    refuse_unless_neutral(where, {f"{name}.rope_type": kind}, supported)
    refuse_unless_neutral(where, others, {f"{name}.partial_rotary_factor": (1.0,)})
    fields = Fields(f"{where}: {name}", parameters)
    theta = fields.number("rope_theta")
    if kind == "default":
        return Rope(theta)
    factor = _positive(fields, "factor")
    if kind == "linear":
        return Rope(theta, LinearScaling(factor))
    low, high = _positive(fields, "low_freq_factor"), _positive(fields, "high_freq_factor")
    if not low < high:
        raise ConfigError(
            f"{where}: {name}.low_freq_factor {low} is not below high_freq_factor {high}"
        )
    length = fields.integer("original_max_position_embeddings", max_positions)
    return Rope(theta, Llama3Scaling(factor, low, high, length))


def _positive(fields: Fields, name: str) -> float:
    value = fields.number(name)
    if not value > 0:
        raise ConfigError(f"{fields.where}: {name} is {value}; it must be above 0")
    return value


def layers_with_full_attention(fields: Fields, num_layers: int) -> frozenset[int] | None:
    """Those that `layer_types` names; None where there is no such field."""
    if fields.values.get("layer_types") is None:
        return None
    kinds = fields.words("layer_types", num_layers, (FULL, SLIDING))
    return frozenset(index for index, kind in enumerate(kinds) if kind == FULL)
