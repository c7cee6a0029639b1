"""Qwen2 and 2.5: Llama's layers with biases on q, k and v. Qwen3: norms of q and k instead.

Yang et al. 2024, 2025. Layers from `max_window_layers` on may have a sliding window.
"""

from dataclasses import replace
from functools import partial

from noria.models.config import ConfigError, DecoderConfig
from noria.models.family import GGUFFormat, HFFormat, ModelFamily
from noria.models.fields import Fields
from noria.models.gguf_rope import ROPE_KEYS, gguf_rope
from noria.models.hf_fields import FULL, ROPE_FIELDS, hf_rope, layers_with_full_attention
from noria.models.tensors import decoder_layout, gguf_names
from noria.service.gguf_file import GGUFFile

_HONOURED = ROPE_FIELDS | {
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "layer_types",
}
_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32}


def _refine_hf(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    config = config.turned_by(hf_rope(fields, config.max_position_embeddings))
    full = layers_with_full_attention(fields, config.num_layers)
    if not fields.boolean("use_sliding_window", False):
        if full is not None and len(full) < config.num_layers:
            raise ConfigError(f"{fields.where}: layer_types are not all {FULL} without a window")
        return config
    window = fields.optional_integer("sliding_window")
    by_default = range(min(fields.integer("max_window_layers"), config.num_layers))
    return replace(config, sliding_window=window, full_layers=by_default if full is None else full)


def _refine_qwen2_hf(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    return replace(_refine_hf(config, fields), qkv_bias=True)


def _refine_qwen3_hf(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    bias = fields.boolean("attention_bias", False)
    return replace(_refine_hf(config, fields), qkv_bias=bias, attention_out_bias=bias)


def _refine_gguf(config: DecoderConfig, fields: Fields, file: GGUFFile) -> DecoderConfig:
    return replace(
        config.turned_by(gguf_rope(fields, file, config)),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
    )


_GGUF = GGUFFormat(gguf_names(), _refine_gguf, honoured=ROPE_KEYS)

QWEN2 = ModelFamily(
    layout=decoder_layout,
    hf=HFFormat(
        _refine_qwen2_hf,
        honoured=_HONOURED,
        neutral={"hidden_act": ("silu",), "attention_bias": (True,), "use_mrope": (False,)},
        defaults=_DEFAULTS,
    ),
    gguf=_GGUF,
)
QWEN3 = ModelFamily(
    layout=partial(decoder_layout, qk_norm=True),
    hf=HFFormat(
        _refine_qwen3_hf,
        honoured=_HONOURED | {"attention_bias"},
        neutral={"hidden_act": ("silu",)},
        defaults=_DEFAULTS | {"head_dim": 128},
    ),
    gguf=_GGUF,
)
