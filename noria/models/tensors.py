"""Which tensors a decoder has, under Hugging Face's names and under GGUF's."""

import re
from collections.abc import Callable, Mapping

from noria.models.config import DecoderConfig
from noria.models.family import GGUFTensor, Layout, Parameter, Part

# Model name of a norm -> Hugging Face module, both within a layer.
LayerNorms = Mapping[str, str]
PRE_NORMS: LayerNorms = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {"query_norm": "q_norm", "key_norm": "k_norm"}


def decoder_layout(
    config: DecoderConfig,
    norms: LayerNorms = PRE_NORMS,
    *,
    qk_norm: bool = False,
    norms_from_one: bool = False,
) -> Layout:
    """Embedding, layers, norm, and the head if it is not tied."""

    def norm(name: str, module: str, size: int) -> Parameter:
        return Parameter(name, (Part(f"{module}.weight", (size,)),), norms_from_one)

    def layer(index: int) -> tuple[Parameter, ...]:
        here, hidden = f"model.layers.{index}", config.hidden_size
        around = [norm(f"{index}.{name}", f"{here}.{norms[name]}", hidden) for name in norms]
        of_heads = [
            norm(f"{index}.{name}", f"{here}.self_attn.{module}", config.head_dim)
            for name, module in _HEAD_NORMS.items()
        ]
        return (
            *around,
            *_attention(config, index, f"{here}.self_attn"),
            *(of_heads if qk_norm else ()),
            *_mlp(config, index, f"{here}.mlp"),
        )

    head = () if config.tie_word_embeddings else (_embedding("head", "lm_head", config),)
    return Layout(
        before=(_embedding("embedding", "model.embed_tokens", config),),
        layer=layer,
        num_layers=config.num_layers,
        after=(norm("norm", "model.norm", config.hidden_size), *head),
    )


def _embedding(name: str, module: str, config: DecoderConfig) -> Parameter:
    return Parameter(name, (Part(f"{module}.weight", (config.vocab_size, config.hidden_size)),))


def _attention(config: DecoderConfig, index: int, here: str) -> list[Parameter]:
    hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    inputs = {f"{here}.q_proj": q_size, f"{here}.k_proj": kv_size, f"{here}.v_proj": kv_size}
    return [
        *_linear(f"{index}.qkv", inputs, hidden, config.qkv_bias),
        *_linear(
            f"{index}.attention_out", {f"{here}.o_proj": hidden}, q_size, config.attention_out_bias
        ),
    ]


def _mlp(config: DecoderConfig, index: int, here: str) -> list[Parameter]:
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    inputs = {f"{here}.gate_proj": inner, f"{here}.up_proj": inner}
    return [
        *_linear(f"{index}.gate_up", inputs, hidden, bias),
        *_linear(f"{index}.down", {f"{here}.down_proj": hidden}, inner, bias),
    ]


def _linear(name: str, outputs: dict[str, int], size: int, bias: bool) -> list[Parameter]:
    """Modules of `outputs` rows each, side by side: [rows, size] and, if `bias`, [rows]."""
    weights = tuple(Part(f"{module}.weight", (rows, size)) for module, rows in outputs.items())
    biases = tuple(Part(f"{module}.bias", (rows,)) for module, rows in outputs.items())
    return [Parameter(name, weights), *([Parameter(f"{name}_bias", biases)] if bias else [])]


_GGUF_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def gguf_names(
    changed: Mapping[str, str] | None = None, *, norms_added: float = 0.0
) -> Callable[[str, DecoderConfig], GGUFTensor]:
    """From Hugging Face names to GGUF's, `changed` before what most families share.

    `norms_added`: by how much GGUF's norm weights exceed the checkpoint's.
    """
    modules = _GGUF_MODULES | dict(changed or {})

    def tensor(name: str, config: DecoderConfig) -> GGUFTensor:
        del config
        module, _, kind = name.rpartition(".")
        match = _LAYER.fullmatch(module)
        path = modules[module] if match is None else f"blk.{match[1]}.{modules[match[2]]}"
        is_norm = module.endswith("norm")
        return GGUFTensor(f"{path}.{kind}", added=norms_added if is_norm else 0.0)

    return tensor
