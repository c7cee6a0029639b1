"""Gemma 3, text (Gemma Team 2025): norms before and after attention and MLP, local layers.

Five layers of six see a sliding window only and turn by a base of their own.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from noria.models.config import ConfigError, DecoderConfig
from noria.models.family import GGUFFormat, HFFormat, ModelFamily
from noria.models.fields import Fields
from noria.models.gguf_rope import ROPE_KEYS, gguf_rope
from noria.models.hf_fields import ROPE_FIELDS, layers_with_full_attention, parse_rope
from noria.models.rope import Rope
from noria.models.tensors import decoder_layout, gguf_names
from noria.service.gguf_file import GGUFFile

_GLOBAL_THETA, _LOCAL_THETA, _PATTERN = 1_000_000.0, 10_000.0, 6
# The 27B model scales attention by its hidden size per head; GGUF files do not say so.
_LAYERS_OF_27B = 62
NORMS = {
    "attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def _refine_hf(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    full = _full_layers(fields, config.num_layers)
    window = fields.optional_integer("sliding_window")
    if window is None and len(full) < config.num_layers:
        raise ConfigError(f"{fields.where}: sliding_window is missing, and layers have one")
    return replace(
        config.turned_by(_hf_rope(fields, config, "full_attention")),
        local_rope=_hf_rope(fields, config, "sliding_attention"),
        sliding_window=window,
        full_layers=full,
        query_scalar=fields.number("query_pre_attn_scalar"),
        qkv_bias=fields.boolean("attention_bias", False),
        attention_out_bias=fields.boolean("attention_bias", False),
        final_logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def _full_layers(fields: Fields, num_layers: int) -> range | frozenset[int]:
    """transformers 5 notes a pattern beside its list of the layers, and reads the list alone."""
    listed = layers_with_full_attention(fields, num_layers)
    if listed is not None:
        return listed
    pattern, noted = fields.integer("sliding_window_pattern"), "_sliding_window_pattern"
    if fields.integer(noted, pattern) not in (pattern, _PATTERN):
        raise ConfigError(
            f"{fields.where}: {noted} = {fields.integer(noted)} without layer_types is not"
            f" supported (sliding_window_pattern is {pattern})"
        )
    return _every(pattern, num_layers)


def _hf_rope(fields: Fields, config: DecoderConfig, kind: str) -> Rope:
    """`rope_parameters` by kind of layer (transformers 5), or the fields before it.

    `rope_scaling` is the global layers' alone.
    """
    parameters: dict[str, Any] = {}
    by_kind: Mapping[str, Any] = fields.object("rope_parameters")
    if by_kind:
        parameters = dict(Fields(fields.where, by_kind).object(kind))
    elif kind == "full_attention":
        parameters = dict(fields.object("rope_scaling"))
    if parameters.get("rope_theta") is None:
        name = "rope_theta" if kind == "full_attention" else "rope_local_base_freq"
        parameters["rope_theta"] = fields.number(name)
    name = f"rope_parameters.{kind}" if by_kind else "rope_scaling"
    return parse_rope(fields.where, name, parameters, config.max_position_embeddings)


def _refine_gguf(config: DecoderConfig, fields: Fields, file: GGUFFile) -> DecoderConfig:
    window = fields.integer("attention.sliding_window", 0)
    pattern = fields.integer("attention.sliding_window_pattern", _PATTERN)
    is_27b = config.num_layers == _LAYERS_OF_27B
    return replace(
        config.turned_by(gguf_rope(fields, file, config, _GLOBAL_THETA)),
        local_rope=Rope(fields.number("rope.freq_base_swa", _LOCAL_THETA)),
        sliding_window=window or None,
        full_layers=_every(pattern, config.num_layers),
        query_scalar=config.hidden_size / config.num_heads if is_27b else None,
        final_logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def _every(pattern: int, num_layers: int) -> range:
    """The last layer of each `pattern` has full attention; none if it is 0."""
    return range(pattern - 1, num_layers, pattern) if pattern > 0 else range(0)


GEMMA3 = ModelFamily(
    layout=partial(decoder_layout, norms=NORMS, qk_norm=True, norms_from_one=True),
    hf=HFFormat(
        _refine_hf,
        honoured=ROPE_FIELDS
        | {
            "attention_bias",
            "final_logit_softcapping",
            "layer_types",
            "query_pre_attn_scalar",
            "rope_local_base_freq",
            "sliding_window",
            "sliding_window_pattern",
            "_sliding_window_pattern",
        },
        neutral={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "hidden_act": ("gelu_pytorch_tanh",),
            "attn_logit_softcapping": (),
            "use_bidirectional_attention": (False,),
        },
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": _LOCAL_THETA,
            "rope_theta": _GLOBAL_THETA,
            "sliding_window": 4096,
            "sliding_window_pattern": _PATTERN,
            "tie_word_embeddings": True,
        },
    ),
    gguf=GGUFFormat(
        gguf_names(
            {
                "post_attention_layernorm": "post_attention_norm",
                "pre_feedforward_layernorm": "ffn_norm",
                "post_feedforward_layernorm": "post_ffw_norm",
            },
            norms_added=1.0,
        ),
        _refine_gguf,
        honoured=ROPE_KEYS
        | {
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "final_logit_softcapping",
            "rope.freq_base_swa",
        },
    ),
)
