"""A decoder: embedding, layers, norm, head."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from noria.models.config import DecoderConfig
from worker.attention.base import AttentionBackend, KVCacheSpec
from worker.models.blocks import Parameters
from worker.models.layers import Rotation, rms_norm, rotation, softcap
from worker.models.rope import frequencies


class Layer(Protocol):
    """One layer: hidden [T, hidden_size] -> the same shape."""

    def __call__(
        self, hidden: torch.Tensor, by: Rotation, attention: AttentionBackend
    ) -> torch.Tensor: ...


class Decoder:
    """Weights are plain tensors of one dtype; hidden states and K/V have the same.

    Norms held as differences from one are fp32. Embeddings are multiplied by
    `embedding_scale`, rounded to the weights' dtype.
    """

    def __init__(
        self,
        config: DecoderConfig,
        parameters: Parameters,
        layers: Sequence[Layer],
        embedding_scale: float = 1.0,
    ) -> None:
        self.config = config
        self._embedding = parameters["embedding"]
        self._norm = parameters["norm"]
        self._head = parameters["embedding" if config.tie_word_embeddings else "head"]
        self._layers = layers
        dtype = self._embedding.dtype
        self._embedding_scale = torch.tensor(embedding_scale, dtype=dtype).item()
        ropes = [config.rope_of(index) for index in range(config.num_layers)]
        distinct = list(dict.fromkeys(ropes))
        device = self._embedding.device
        self._turns = [(frequencies(r, config.head_dim).to(device), r.magnitude) for r in distinct]
        self._rope_index = [distinct.index(rope) for rope in ropes]
        self.kv_spec = KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, dtype)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        rotations = [rotation(positions, *turns) for turns in self._turns]
        hidden = F.embedding(token_ids, self._embedding)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        for layer, rope in zip(self._layers, self._rope_index, strict=True):
            hidden = layer(hidden, rotations[rope], attention)
        return rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, cap = F.linear(hidden, self._head).float(), self.config.final_logit_softcap
        return logits if cap is None else softcap(logits, cap)
