"""Weights of a GGUF file, dequantised to fp32."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from noria.models.family import GGUFTensor
from noria.models.gguf_rope import ROPE_FACTORS
from noria.service.gguf_file import GGUFFile, TensorInfo
from worker.models.weights import WeightsError


class GGUFWeights:
    """Tensors under their Hugging Face names; surplus ones keep their own.

    `expected` maps the Hugging Face names of the model's tensors to GGUF's. Factors of the
    rotary embedding are the config's, not weights.
    """

    def __init__(self, file: GGUFFile, expected: Mapping[str, GGUFTensor]) -> None:
        """Raises WeightsError for a tensor of unknown type or beyond the end of the file."""
        self._file, self._expected = file, expected
        names = {theirs.name: ours for ours, theirs in expected.items()}
        self._infos = {
            names.get(name, name): info
            for name, info in file.tensors.items()
            if name != ROPE_FACTORS
        }
        for info in self._infos.values():
            _check_extent(file, info)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self._infos.items()}

    def read(self, name: str) -> torch.Tensor:
        info = self._infos[name]
        kind = GGMLQuantizationType(info.ggml_type)
        raw = np.frombuffer(self._file.data, np.uint8, _num_bytes(info), info.offset)
        try:
            values = dequantize(raw.reshape(*info.shape[:-1], -1), kind)
        except NotImplementedError:
            problem = f"{name} is of type {kind.name}, which cannot be dequantised"
            raise WeightsError(f"{self._file.path}: {problem}") from None
        tensor = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))
        theirs = self._expected[name]
        if theirs.interleaved_heads:
            tensor = _half_rotation_order(tensor, theirs.interleaved_heads)
        return tensor - theirs.added if theirs.added else tensor


def _half_rotation_order(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows (0, 1), (2, 3), ... of each head become (0, d/2), (1, d/2 + 1), ..."""
    paired = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)


def _num_bytes(info: TensorInfo) -> int:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(info.ggml_type)]
    return math.prod(info.shape) // int(block) * int(size)


def _check_extent(file: GGUFFile, info: TensorInfo) -> None:
    try:
        kind = GGMLQuantizationType(info.ggml_type)
    except ValueError:
        raise WeightsError(f"{file.path}: {info.name} has unknown type {info.ggml_type}") from None
    block = int(GGML_QUANT_SIZES[kind][0])
    if not info.shape or info.shape[-1] % block:
        raise WeightsError(
            f"{file.path}: {info.name} {info.shape} is not made of {kind.name} blocks of {block}"
        )
    end, size = info.offset + _num_bytes(info), len(file.data)
    if end > size:
        raise WeightsError(
            f"{file.path}: {info.name} ends at byte {end}, the file at {size}: truncated"
        )
