"""The native kernels for tests: each variant that this CPU runs, built once."""

from functools import cache

import pytest
import torch

from tests.support.tiny_models import Forward
from worker.native.backend import NativeBackend
from worker.native.kernels import Kernels, load_kernels
from worker.native.model import NativeDecoder
from worker.native.variants import VARIANT_NAMES, UnsupportedCPUError


@cache
def kernels(variant: str, threads: int = 2) -> Kernels:
    """Skips the test where the CPU lacks what the variant needs."""
    try:
        return load_kernels(variant, threads)
    except UnsupportedCPUError as error:
        pytest.skip(f"{variant}: {error}")


def native_decoder(checkpoint, variant: str, threads: int = 2) -> NativeDecoder:
    parameters = checkpoint.read(torch.bfloat16)
    return NativeDecoder(checkpoint.config, parameters, kernels(variant, threads))


class NativeForward(Forward):
    """A native model with its own cache; NaN lies wherever nothing was written."""

    def __init__(self, model, num_blocks=64, block_size=16):
        self.model, self.block_size = model, block_size
        self.backend = NativeBackend(model._kernels)
        self.backend.allocate(model.kv_spec, num_blocks, block_size)
        self.backend._memory.fill_(float("nan"))


__all__ = ["VARIANT_NAMES", "NativeForward", "kernels", "native_decoder"]
