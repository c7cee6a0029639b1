"""The Llama family (Touvron et al. 2023): RMSNorm before attention and before a SwiGLU MLP."""

import torch

from noria.models.config import DecoderConfig
from worker.attention.base import AttentionBackend
from worker.models.blocks import GatedMLP, Parameters, SelfAttention
from worker.models.decoder import Decoder
from worker.models.layers import Rotation, rms_norm, silu_mul


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
