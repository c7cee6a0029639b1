"""Every attention backend as a subject of the conformance suite, as far as this computer goes."""

from functools import cache

import pytest
import torch

from bench.gpu.conformance import CPU, Subject
from tests.support import flash_contracts
from tests.support.native import VARIANT_NAMES, kernels
from worker.attention.flash import (
    FlashAttention2Backend,
    FlashAttention3Backend,
    TorchVarlenBackend,
)
from worker.attention.padded import PaddedBackend
from worker.attention.torch_backend import TorchBackend
from worker.native.backend import NativeBackend

BF16_TOLERANCE, FP16_TOLERANCE, FP32_TOLERANCE = 2e-2, 2e-3, 2e-5


@cache
def triton_backend():
    """The module, its kernels interpreted. Skips the test where there is no triton."""
    pytest.importorskip("triton", reason="triton is not installed: pip install noria[gpu]")
    from worker.attention import triton_backend

    assert triton_backend.INTERPRETED, "tests/conftest.py sets TRITON_INTERPRET"
    return triton_backend


def native(variant, threads=2):
    tolerance = BF16_TOLERANCE if variant == "avx512_bf16" else FP32_TOLERANCE
    return Subject(
        lambda: NativeBackend(kernels(variant, threads)), torch.bfloat16, tolerance,
        lambda backend: [backend._memory],
    )  # fmt: skip


def torch_subject(dtype, tolerance):
    return Subject(TorchBackend, dtype, tolerance, lambda backend: [backend._keys, backend._values])


def triton_subject(dtype, tolerance):
    def make():
        return triton_backend().TritonBackend(CPU)

    return Subject(make, dtype, tolerance, lambda backend: [backend._cache])


def flash_subject(kind, function, dtype=torch.bfloat16, tolerance=BF16_TOLERANCE):
    return Subject(
        lambda: kind(CPU, function), dtype, tolerance, lambda backend: [backend._cache],
        kind.default_block_size,
    )  # fmt: skip


def padded_subject(dtype, tolerance):
    return Subject(lambda: PaddedBackend(CPU), dtype, tolerance, lambda backend: [backend._cache])


ON_CPU = {
    "torch": torch_subject(torch.float32, FP32_TOLERANCE),
    "torch bfloat16": torch_subject(torch.bfloat16, BF16_TOLERANCE),
    "torch_padded": padded_subject(torch.float32, FP32_TOLERANCE),
    "torch_padded float16": padded_subject(torch.float16, FP16_TOLERANCE),
    **{f"cpu_native {variant}": native(variant) for variant in VARIANT_NAMES},
    "cpu_native, one thread": native("avx2", 1),
    "cpu_native, more threads than cores": native("avx2", 5),
}
FLASH = {
    "flash_attn_2, by contract": flash_subject(
        FlashAttention2Backend, flash_contracts.flash_attn_varlen_func
    ),
    "flash_attn_3, by contract": flash_subject(
        FlashAttention3Backend, flash_contracts.flash_attn_with_kvcache, torch.float16,
        FP16_TOLERANCE,
    ),
    "torch_varlen, by contract": flash_subject(TorchVarlenBackend, flash_contracts.varlen_attn),
}  # fmt: skip
TRITON = {
    "triton, interpreted": triton_subject(torch.float32, FP32_TOLERANCE),
    "triton bfloat16, interpreted": triton_subject(torch.bfloat16, BF16_TOLERANCE),
    "triton float16, interpreted": triton_subject(torch.float16, FP16_TOLERANCE),
}
