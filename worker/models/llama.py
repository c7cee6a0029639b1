"""The Llama family (Touvron et al. 2023): RMSNorm before attention and before a SwiGLU MLP."""

from dataclasses import replace

import torch

from noria.service.gguf_file import GGUFFile
from worker.attention.base import AttentionBackend
from worker.models.base import GGUFFormat, GGUFTensor, HFFormat, ModelFamily
from worker.models.blocks import GatedMLP, Parameters, SelfAttention
from worker.models.config import DecoderConfig
from worker.models.decoder import Decoder
from worker.models.fields import Fields
from worker.models.gguf_rope import ROPE_KEYS, gguf_rope
from worker.models.hf_fields import ROPE_FIELDS, hf_rope
from worker.models.layers import Rotation, rms_norm, silu_mul
from worker.models.tensors import decoder_parameters, gguf_names


class PreNormLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, parameters: Parameters, index: int) -> None:
        self._eps = config.rms_norm_eps
        self._attention_norm = parameters[f"{index}.attention_norm"]
        self._attention = SelfAttention(config, parameters, index)
        self._mlp_norm = parameters[f"{index}.mlp_norm"]
        self._mlp = GatedMLP(parameters, index, silu_mul)

    def __call__(
        self, hidden: torch.Tensor, by: Rotation, attention: AttentionBackend
    ) -> torch.Tensor:
        normed = rms_norm(hidden, self._attention_norm, self._eps)
        hidden = hidden + self._attention(normed, by, attention)
        return hidden + self._mlp(rms_norm(hidden, self._mlp_norm, self._eps))


def build_pre_norm(config: DecoderConfig, parameters: Parameters) -> Decoder:
    layers = [PreNormLayer(config, parameters, index) for index in range(config.num_layers)]
    return Decoder(config, parameters, layers)


def _refine_hf(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    bias = fields.boolean("attention_bias", False)
    return replace(
        config,
        rope=hf_rope(fields, config.max_position_embeddings),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def _refine_gguf(config: DecoderConfig, fields: Fields, file: GGUFFile) -> DecoderConfig:
    return replace(
        config,
        rope=gguf_rope(fields, file, config.head_dim),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


_plain_name = gguf_names()


def llama_gguf_tensor(name: str, config: DecoderConfig) -> GGUFTensor:
    """llama.cpp rotates neighbouring rows of this architecture alone. Raises KeyError."""
    heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}
    interleaved = next((count for module, count in heads.items() if module in name), 0)
    return replace(_plain_name(name, config), interleaved_heads=interleaved)


LLAMA = ModelFamily(
    parameters=decoder_parameters,
    build=build_pre_norm,
    hf=HFFormat(
        _refine_hf,
        honoured=frozenset(("attention_bias", "mlp_bias")) | ROPE_FIELDS,
        neutral={"hidden_act": ("silu",)},
    ),
    gguf=GGUFFormat(llama_gguf_tensor, _refine_gguf, honoured=ROPE_KEYS),
)
