"""The two halves of a decoder layer that families compose: self-attention and gated MLP."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812

from noria.models.config import DecoderConfig
from worker.attention.base import AttentionBackend, FusedRotation
from worker.models.layers import Rotation, rms_norm, rotate

Parameters = Mapping[str, torch.Tensor]


class SelfAttention:
    """Rotary grouped-query attention (Ainslie et al. 2023) of one layer.

    Biases and the norms of query and key heads are applied where there are parameters
    of them.
    """

    def __init__(self, config: DecoderConfig, parameters: Parameters, layer: int) -> None:
        self._layer, self._eps = layer, config.rms_norm_eps
        self._num_heads, self._head_dim = config.num_heads, config.head_dim
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._scale, self._window = config.attention_scale, config.window_of(layer)
        self._qkv, self._qkv_bias = parameters[f"{layer}.qkv"], parameters.get(f"{layer}.qkv_bias")
        self._out = parameters[f"{layer}.attention_out"]
        self._out_bias = parameters.get(f"{layer}.attention_out_bias")
        self._query_norm = parameters.get(f"{layer}.query_norm")
        self._key_norm = parameters.get(f"{layer}.key_norm")

    def __call__(
        self, hidden: torch.Tensor, by: Rotation, attention: AttentionBackend
    ) -> torch.Tensor:
        """hidden [T, hidden_size], already normed; the same shape."""
        num_positions = hidden.shape[0]
        heads = F.linear(hidden, self._qkv, self._qkv_bias).view(num_positions, -1, self._head_dim)
        turning = self._normed(heads[:, : self._num_rotated])
        query = self._written(turning, heads[:, self._num_rotated :], by, attention)
        attended = attention.attend(self._layer, query, self._scale, self._window)
        return F.linear(attended.reshape(num_positions, -1), self._out, self._out_bias)

    def _written(
        self,
        turning: torch.Tensor,
        value: torch.Tensor,
        by: Rotation,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Keys turned and, with the values, in the cache; the queries turned."""
        if isinstance(attention, FusedRotation):
            return attention.rotate_and_write(self._layer, turning, value, by.cos, by.sin)
        rotated = rotate(turning, by)
        attention.write_kv(self._layer, rotated[:, self._num_heads :], value)
        return rotated[:, : self._num_heads]

    def _normed(self, heads: torch.Tensor) -> torch.Tensor:
        """Query and key heads [T, N, head_dim], each over its own root mean square."""
        if self._query_norm is None or self._key_norm is None:
            return heads
        query, key = heads[:, : self._num_heads], heads[:, self._num_heads :]
        normed = (
            rms_norm(query, self._query_norm, self._eps),
            rms_norm(key, self._key_norm, self._eps),
        )
        return torch.cat(normed, dim=1)


class GatedMLP:
    """down(activation(gate(hidden)) * up(hidden)); `activation` takes both halves in one."""

    def __init__(
        self,
        parameters: Parameters,
        layer: int,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._activation = activation
        self._gate_up = parameters[f"{layer}.gate_up"]
        self._gate_up_bias = parameters.get(f"{layer}.gate_up_bias")
        self._down = parameters[f"{layer}.down"]
        self._down_bias = parameters.get(f"{layer}.down_bias")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        gated = self._activation(F.linear(hidden, self._gate_up, self._gate_up_bias))
        return F.linear(gated, self._down, self._down_bias)
