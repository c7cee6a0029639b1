"""The cache's size follows from the model's, and is told with its arithmetic."""

import pytest
import torch

from worker.attention.base import KVCacheSpec
from worker.attention.torch_backend import TorchBackend
from worker.kv_cache import KVCache, allocate_kv_cache, blocks_that_fit

OPT_13B = KVCacheSpec(num_layers=40, num_kv_heads=40, head_dim=128, dtype=torch.float16)


def test_bytes_per_token_are_those_of_known_models():
    """OPT-13B in fp16: 800 KiB a token; Qwen2.5-7B: 57,344 bytes."""
    assert OPT_13B.bytes_per_token == 819_200
    assert KVCacheSpec(28, 4, 128, torch.bfloat16).bytes_per_token == 57_344


def test_the_description_shows_bytes_and_both_units():
    text = KVCache(OPT_13B, num_blocks=4000, block_size=16).describe()
    for part in ("819,200 bytes a token", "64,000 tokens", "52,428,800,000 bytes", "52.43 GB",
                 "48.83 GiB"):  # fmt: skip
        assert part in text


def test_blocks_that_fit_leave_room_for_the_null_block():
    block = 16 * OPT_13B.bytes_per_token
    assert blocks_that_fit(OPT_13B, 16, 2 * block) == 1
    assert blocks_that_fit(OPT_13B, 16, 11 * block - 1) == 9


def test_memory_for_no_block_is_refused_with_both_sizes():
    with pytest.raises(ValueError, match=r"^1000 bytes .* need 26214400"):
        blocks_that_fit(OPT_13B, 16, 1000)


def test_allocation_goes_through_the_backend():
    spec = KVCacheSpec(2, 1, 8, torch.float32)
    backend = TorchBackend()
    cache = allocate_kv_cache(backend, spec, 5, 4)
    held = backend._keys.nbytes + backend._values.nbytes
    assert cache.num_bytes == held == 5 * 4 * spec.bytes_per_token
