"""Which layers compute which family of noria.models."""

from collections.abc import Callable, Mapping

import torch

from noria.models.config import DecoderConfig
from worker.models.decoder import Decoder
from worker.models.gemma3 import build_sandwich
from worker.models.llama import build_pre_norm

Builder = Callable[[DecoderConfig, Mapping[str, torch.Tensor]], Decoder]
BUILDERS: Mapping[str, Builder] = {
    "llama": build_pre_norm,
    "mistral": build_pre_norm,
    "qwen2": build_pre_norm,
    "qwen3": build_pre_norm,
    "gemma3": build_sandwich,
}
