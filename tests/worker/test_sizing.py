"""How many KV blocks a worker takes follows from memory, weights and settings, and is told."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noria.plan.memory import HostMemory
from worker.attention.base import KVCacheSpec
from worker.build import build_engine
from worker.config import WorkerConfig
from worker.sizing import Budget, cache_size, kv_budget

OPT_13B = KVCacheSpec(num_layers=40, num_kv_heads=40, head_dim=128, dtype=torch.float16)
SMALL = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=8, dtype=torch.float32)
GIB = 2**30
MEMORY = HostMemory(64 * GIB, 40 * GIB, "MemAvailable")


def budget_of(num_bytes, reason):
    return Budget(num_bytes, reason, 100 * GIB)


def config(**settings):
    return WorkerConfig(Path("model"), **settings)


def test_half_of_what_the_weights_leave_free_is_taken():
    budget = kv_budget(config(), MEMORY, 10 * GIB)
    assert budget.num_bytes == 15 * GIB
    for part in (f"{40 * GIB:,} bytes free (MemAvailable)", f"{10 * GIB:,} of weights", "x 0.5"):
        assert part in budget.reason


def test_workers_of_one_computer_divide_it():
    budget = kv_budget(config(local_workers=3), MEMORY, 10 * GIB)
    assert budget.num_bytes == 10 * GIB // 2 // 3
    assert "3 workers" in budget.reason


def test_weights_that_do_not_fit_are_refused_with_both_sizes():
    with pytest.raises(ValueError, match=f"{40 * GIB:,} bytes .* available.*{41 * GIB:,}"):
        kv_budget(config(), MEMORY, 41 * GIB)


def test_a_given_size_is_taken_unless_it_is_not_free():
    assert kv_budget(config(kv_cache_memory_bytes=38 * GIB), MEMORY, 2 * GIB).num_bytes == 38 * GIB
    with pytest.raises(
        ValueError, match=rf"{39 * GIB:,} .*{2 * GIB:,} .*need {41 * GIB:,} .*; {40 * GIB:,} are fr"
    ):
        kv_budget(config(kv_cache_memory_bytes=39 * GIB), MEMORY, 2 * GIB)


def test_a_given_size_is_that_of_each_worker_on_the_computer():
    given = config(kv_cache_memory_bytes=18 * GIB, local_workers=2)
    assert kv_budget(given, MEMORY, 2 * GIB).num_bytes == 18 * GIB
    with pytest.raises(ValueError, match=rf"of each of 2 workers need {42 * GIB:,} .*{40 * GIB:,}"):
        kv_budget(given, MEMORY, 3 * GIB)


def test_blocks_that_memory_cannot_hold_beside_the_weights_are_refused_with_both_sizes():
    budget = kv_budget(config(local_workers=2), MEMORY, GIB)
    assert budget.most == 19 * GIB
    block = 16 * OPT_13B.bytes_per_token
    fits = 19 * GIB // block - 1
    sized = cache_size(config(num_blocks=fits), budget, OPT_13B, 16, 2048)
    assert sized.num_blocks == fits
    with pytest.raises(ValueError, match=rf"{(fits + 2) * block:,} bytes; .*{19 * GIB:,} are free"):
        cache_size(config(num_blocks=fits + 1), budget, OPT_13B, 16, 2048)


def test_no_more_is_taken_than_a_full_batch_of_full_lengths_uses():
    size = cache_size(config(max_num_seqs=3), budget_of(GIB, "because"), SMALL, 16, 100)
    assert (size.num_blocks, size.max_model_len) == (3 * 7, 100)
    assert "max_num_seqs 3 x 100 tokens" in size.reason
    assert "because" in size.reason


def test_a_short_cache_shortens_what_a_request_may_ask_for():
    per_block = 16 * SMALL.bytes_per_token
    size = cache_size(config(), budget_of(5 * per_block, "because"), SMALL, 16, 1000)
    assert (size.num_blocks, size.num_tokens, size.max_model_len) == (4, 64, 64)
    assert size.num_bytes == 5 * per_block


def test_a_length_asked_for_that_does_not_fit_is_refused_with_all_numbers():
    given = config(max_model_len=2048)
    budget = budget_of(101 * 16 * 819_200, "because")
    text = r"max_model_len 2,048 exceeds the 1,600 tokens .*1,677,721,600 bytes.*1,310,720,000"
    with pytest.raises(ValueError, match=text):
        cache_size(given, budget, OPT_13B, 16, 4096)


def test_memory_for_no_block_is_refused_with_both_sizes_and_what_helps():
    with pytest.raises(
        ValueError, match=r"1,000 bytes .* 26,214,400.*kv_cache_memory_bytes gives more"
    ):
        cache_size(config(), budget_of(1000, "because"), OPT_13B, 16, 4096)


def test_more_than_the_models_positions_are_refused():
    with pytest.raises(ValueError, match="max_model_len 101 exceeds the model's 100"):
        cache_size(config(max_model_len=101), budget_of(GIB, ""), SMALL, 16, 100)


def test_the_arithmetic_shows_bytes_and_both_units():
    size = cache_size(config(num_blocks=3999), budget_of(0, ""), OPT_13B, 16, 2048)
    for part in ("819,200 bytes a token", "63,984 tokens", "52,428,800,000 bytes = 52.4 GB = 48.8",
                 "num_blocks as given"):  # fmt: skip
        assert part in size.arithmetic()


@given(
    budget=st.integers(0, 10**6), seqs=st.integers(1, 8), block=st.integers(1, 40),
    longest=st.integers(1, 500),
)  # fmt: skip
def test_neither_blocks_nor_lengths_promise_what_the_other_cannot_hold(
    budget, seqs, block, longest
):
    try:
        size = cache_size(config(max_num_seqs=seqs), budget_of(budget, ""), SMALL, block, longest)
    except ValueError:
        assert budget < 2 * block * SMALL.bytes_per_token
        return
    assert size.max_model_len <= min(longest, size.num_tokens)
    assert size.num_bytes <= budget
    assert size.num_blocks <= seqs * -(-longest // block)


@pytest.mark.model
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_model_len": 8193}, "max_model_len 8193 exceeds the model's 8192 positions"),
        ({"max_model_len": 512, "num_blocks": 3}, "max_model_len 512 exceeds the 48 tokens"),
        ({"kv_cache_memory_bytes": 10}, "10 bytes are left for the KV cache"),
    ],
)
def test_what_cannot_be_held_is_refused_before_weights_are_read(settings, named, demo_model_path):
    told = []
    with pytest.raises(ValueError, match=named):
        build_engine(
            WorkerConfig(demo_model_path, cpu_threads=1, **settings),
            lambda stage, done, total: told.append(stage),
        )
    assert "loading weights" not in told
