"""The cache's size follows from the model's."""

import torch

from worker.attention.base import KVCacheSpec
from worker.attention.torch_backend import TorchBackend
from worker.kv_cache import allocate_kv_cache

OPT_13B = KVCacheSpec(num_layers=40, num_kv_heads=40, head_dim=128, dtype=torch.float16)


def test_bytes_per_token_are_those_of_known_models():
    """OPT-13B in fp16: 800 KiB a token; Qwen2.5-7B: 57,344 bytes."""
    assert OPT_13B.bytes_per_token == 819_200
    assert KVCacheSpec(28, 4, 128, torch.bfloat16).bytes_per_token == 57_344


def test_allocation_goes_through_the_backend():
    spec = KVCacheSpec(2, 1, 8, torch.float32)
    backend = TorchBackend()
    cache = allocate_kv_cache(backend, spec, 5, 4)
    held = backend._keys.nbytes + backend._values.nbytes
    assert cache.num_bytes == held == 5 * 4 * spec.bytes_per_token
