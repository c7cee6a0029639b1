"""Decoders of Llama's shape (worker.models.llama.PreNormLayer), a whole step in one call."""

import torch

from noria.models.config import DecoderConfig
from noria.models.kernels import LANES, packed_elements
from worker.attention.base import KVCacheSpec
from worker.models.layers import rotation
from worker.models.rope import frequencies
from worker.native.backend import NativeBackend
from worker.native.binding import LayerStruct, LinearStruct, ModelStruct, address
from worker.native.kernels import Kernels
from worker.native.weights import Arena


class NativeDecoder:
    """Weights and K/V are bf16, packed once; sums and the hidden states of a step fp32."""

    def __init__(
        self, config: DecoderConfig, parameters: dict[str, torch.Tensor], kernels: Kernels
    ) -> None:
        """parameters: bf16, under the family's names; emptied, so that no weight lies twice.

        `reasons_against` of noria.models.kernels must have found none. Raises RuntimeError
        without memory.
        """
        self.config, self._kernels = config, kernels
        size = _packed_size(config, parameters)
        self._arena = Arena(size, kernels.prefer_huge_pages)
        self._kept: list[torch.Tensor] = []
        self._layers = (LayerStruct * config.num_layers)(
            *(self._layer(index, parameters) for index in range(config.num_layers))
        )
        self._model = self._described(parameters)
        self._frequencies = frequencies(config.rope, config.head_dim)
        self.kv_spec = KVCacheSpec(
            config.num_layers, config.num_kv_heads, config.head_dim, torch.bfloat16
        )

    @property
    def weight_bytes(self) -> int:
        return self._arena.num_bytes + sum(t.numel() * t.itemsize for t in self._kept)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: NativeBackend
    ) -> torch.Tensor:
        angles = rotation(positions, self._frequencies, self.config.rope.magnitude)
        shape = len(token_ids), self.config.hidden_size
        hidden = torch.empty(shape, dtype=self._kernels.activations)
        attention.step(self._model, token_ids, angles.cos, angles.sin, hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.empty(hidden.shape[0], self.config.vocab_size)
        self._kernels.logits(self._model, hidden.contiguous(), logits)
        return logits

    def _layer(self, index: int, parameters: dict[str, torch.Tensor]) -> LayerStruct:
        def take(name: str) -> torch.Tensor:
            return parameters.pop(f"{index}.{name}")

        def floats(name: str) -> int | None:
            return self._floats(parameters.pop(f"{index}.{name}", None))

        return LayerStruct(
            attention_norm=floats("attention_norm"),
            mlp_norm=floats("mlp_norm"),
            qkv_bias=floats("qkv_bias"),
            query_norm=floats("query_norm"),
            key_norm=floats("key_norm"),
            qkv=self._linear(take("qkv")),
            out=self._linear(take("attention_out")),
            gate_up=self._linear(*take("gate_up").chunk(2)),
            down=self._linear(take("down")),
            window=self.config.window_of(index) or 0,
        )

    def _described(self, parameters: dict[str, torch.Tensor]) -> ModelStruct:
        config, tied = self.config, self.config.tie_word_embeddings
        embedding = parameters.pop("embedding")
        head = self._linear(embedding if tied else parameters.pop("head"))
        if not tied:
            self._kept.append(embedding)
        return ModelStruct(
            **{name: getattr(config, field) for name, field in _SIZES.items()},
            embedding_is_packed=tied,
            eps=config.rms_norm_eps,
            scale=config.attention_scale,
            embedding=head.packed if tied else address(embedding),
            norm=self._floats(parameters.pop("norm")),
            head=head,
            layer=self._layers,
        )

    def _linear(self, *weights: torch.Tensor) -> LinearStruct:
        packed = self._arena.pack(*weights)
        return LinearStruct(address(packed), packed.shape[0] * LANES, weights[0].shape[1])

    def _floats(self, weight: torch.Tensor | None) -> int | None:
        if weight is None:
            return None
        self._kept.append(weight.float().contiguous())
        return address(self._kept[-1])


_SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_layers",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "inner": "intermediate_size",
}


def _packed_size(config: DecoderConfig, parameters: dict[str, torch.Tensor]) -> int:
    """Elements of all packed matrices; an embedding of its own is only looked up."""
    looked_up = "" if config.tie_word_embeddings else "embedding"
    matrices = (p for name, p in parameters.items() if p.dim() == 2 and name != looked_up)
    return sum(packed_elements(*matrix.shape) for matrix in matrices)
