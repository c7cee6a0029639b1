"""The Llama family: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

Touvron et al. 2023; query and key heads are grouped as in Ainslie et al. 2023.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from worker.attention.base import AttentionBackend, KVCacheSpec
from worker.models.base import ModelFamily, Parameter, Part
from worker.models.config import ModelConfig
from worker.models.layers import (
    Rotation,
    inverse_frequencies,
    rms_norm,
    rotate,
    rotation,
    silu_mul,
)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights [out, in] of one layer; `qkv` and `gate_up` are fused along `out`."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    attention_out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class LlamaModel:
    """Weights are plain tensors of one dtype; hidden states and K/V have the same."""

    def __init__(self, config: ModelConfig, parameters: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self._embedding = parameters["embedding"]
        self._norm = parameters["norm"]
        self._head = parameters["embedding" if config.tie_word_embeddings else "head"]
        self._layers = [
            _Layer(**{name: parameters[f"{index}.{name}"] for name in _Layer.__slots__})
            for index in range(config.num_layers)
        ]
        self._frequencies = inverse_frequencies(config.head_dim, config.rope_theta)
        self._scale = config.head_dim**-0.5
        self.kv_spec = KVCacheSpec(
            config.num_layers, config.num_kv_heads, config.head_dim, self._embedding.dtype
        )

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        angles = rotation(positions, self._frequencies)
        hidden = F.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = rms_norm(hidden, layer.attention_norm, eps)
            hidden = hidden + self._attend(index, layer, normed, angles, attention)
            normed = rms_norm(hidden, layer.mlp_norm, eps)
            hidden = hidden + F.linear(silu_mul(F.linear(normed, layer.gate_up)), layer.down)
        return rms_norm(hidden, self._norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self._head).float()

    def _attend(
        self,
        index: int,
        layer: _Layer,
        hidden: torch.Tensor,
        angles: Rotation,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        config, num_positions = self.config, hidden.shape[0]
        heads = F.linear(hidden, layer.qkv).view(num_positions, -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated = rotate(heads[:, :num_rotated], angles)
        attention.write_kv(index, rotated[:, config.num_heads :], heads[:, num_rotated:])
        attended = attention.attend(index, rotated[:, : config.num_heads], self._scale)
        return F.linear(attended.reshape(num_positions, -1), layer.attention_out)


def llama_parameters(config: ModelConfig) -> list[Parameter]:
    """Every tensor of the model, in the order of computation."""
    embedding_shape = (config.vocab_size, config.hidden_size)
    parameters = [_single("embedding", "model.embed_tokens", *embedding_shape)]
    for index in range(config.num_layers):
        parameters += _layer_parameters(config, index)
    parameters.append(_single("norm", "model.norm", config.hidden_size))
    if not config.tie_word_embeddings:
        parameters.append(_single("head", "lm_head", *embedding_shape))
    return parameters


def _layer_parameters(config: ModelConfig, index: int) -> list[Parameter]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    here = f"model.layers.{index}"
    attention, mlp = f"{here}.self_attn", f"{here}.mlp"
    qkv = (
        Part(f"{attention}.q_proj.weight", (q_size, hidden)),
        Part(f"{attention}.k_proj.weight", (kv_size, hidden)),
        Part(f"{attention}.v_proj.weight", (kv_size, hidden)),
    )
    gate_up = (
        Part(f"{mlp}.gate_proj.weight", (inner, hidden)),
        Part(f"{mlp}.up_proj.weight", (inner, hidden)),
    )
    return [
        _single(f"{index}.attention_norm", f"{here}.input_layernorm", hidden),
        Parameter(f"{index}.qkv", qkv),
        _single(f"{index}.attention_out", f"{attention}.o_proj", hidden, q_size),
        _single(f"{index}.mlp_norm", f"{here}.post_attention_layernorm", hidden),
        Parameter(f"{index}.gate_up", gate_up),
        _single(f"{index}.down", f"{mlp}.down_proj", hidden, inner),
    ]


def _single(name: str, module: str, *shape: int) -> Parameter:
    return Parameter(name, (Part(f"{module}.weight", shape),))


_GGUF_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`. Raises KeyError."""
    module = name.removesuffix(".weight")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if match is None:
        return f"{_GGUF_MODULES[module]}.weight"
    return f"blk.{match[1]}.{_GGUF_MODULES[match[2]]}.weight"


def llama_gguf_interleaved_heads(name: str, config: ModelConfig) -> int:
    if name.endswith("self_attn.q_proj.weight"):
        return config.num_heads
    return config.num_kv_heads if name.endswith("self_attn.k_proj.weight") else 0


LLAMA = ModelFamily(llama_parameters, LlamaModel, llama_gguf_name, llama_gguf_interleaved_heads)
