"""Gemma 3, text (Gemma Team 2025): norms before and after attention and MLP, local layers.

Five layers of six see a sliding window only and turn by a base of their own.
"""

import torch

from noria.models.config import DecoderConfig
from noria.models.gemma3 import NORMS
from worker.attention.base import AttentionBackend
from worker.models.blocks import GatedMLP, Parameters, SelfAttention
from worker.models.decoder import Decoder
from worker.models.layers import Rotation, gelu_tanh_mul, rms_norm


class SandwichLayer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: DecoderConfig, parameters: Parameters, index: int) -> None:
        self._norms = [parameters[f"{index}.{name}"] for name in NORMS]
        self._eps = config.rms_norm_eps
        self._attention = SelfAttention(config, parameters, index)
        self._mlp = GatedMLP(parameters, index, gelu_tanh_mul)

    def __call__(
        self, hidden: torch.Tensor, by: Rotation, attention: AttentionBackend
    ) -> torch.Tensor:
        before, after, before_mlp, after_mlp = self._norms
        attended = self._attention(rms_norm(hidden, before, self._eps), by, attention)
        hidden = hidden + rms_norm(attended, after, self._eps)
        fed = self._mlp(rms_norm(hidden, before_mlp, self._eps))
        return hidden + rms_norm(fed, after_mlp, self._eps)


def build_sandwich(config: DecoderConfig, parameters: Parameters) -> Decoder:
    layers = [SandwichLayer(config, parameters, index) for index in range(config.num_layers)]
    return Decoder(config, parameters, layers, embedding_scale=config.hidden_size**0.5)
