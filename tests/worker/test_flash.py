"""The FlashAttention adapters keep to the contract; the contract refuses each breach of it."""

import pytest
import torch

from bench.gpu.conformance import CPU, num_blocks, planned
from tests.support import flash_contracts as contracts
from tests.support.flash_contracts import ContractError
from tests.support.no_sync import HostSyncError, NoSync
from worker.attention.base import KVCacheSpec
from worker.attention.flash import (
    FlashAttention2Backend,
    FlashAttention3Backend,
    TorchVarlenBackend,
)

ADAPTERS = {
    "flash_attn_2": (FlashAttention2Backend, contracts.flash_attn_varlen_func, ("q", "k", "v")),
    "flash_attn_3": (FlashAttention3Backend, contracts.flash_attn_with_kvcache, ()),
    "torch_varlen": (
        TorchVarlenBackend,
        contracts.varlen_attn,
        ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"),
    ),
}


def call_of(adapter, step=((40, 1), (30, 11))):
    """The named arguments of the one call that the adapter makes, and its function."""
    kind, function, names = ADAPTERS[adapter]
    calls = []

    def recording(*args, **named):
        calls.append({**dict(zip(names, args, strict=True)), **named})
        return function(*args, **named)

    backend = kind(CPU, recording)
    backend.allocate(KVCacheSpec(1, 2, 64, torch.bfloat16), num_blocks(step, 256), 256)
    backend.plan(planned(step, 256))
    count = sum(positions for _, positions in step)
    backend.write_kv(0, *torch.randn(2, count, 2, 64).bfloat16())
    backend.attend(0, torch.randn(count, 6, 64).bfloat16(), 0.125, window=5)
    return calls[0], function


def heads(count, size, kind=torch.bfloat16):
    return torch.zeros(12, count, size, dtype=kind)


def cache(size=64, block=256, kind=torch.bfloat16):
    return torch.zeros(8, block, 2, size, dtype=kind)


def long(tensor):
    return tensor.long()


def apart(tensor):
    """The same numbers, every other one of a longer row."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


def both(keys, values, make):
    return {keys: lambda _: make(), values: lambda _: make()}


def breaches_of_tensors(query, keys, values):
    """What all three refuse of queries, keys and values."""
    return {
        "float32": (
            {query: lambda q: q.float(), **both(keys, values, lambda: cache(kind=torch.float32))},
            "neither float16",
        ),
        "another dtype": ({keys: lambda k: k.half()}, "another dtype"),
        "head_dim 60": (
            {query: lambda _: heads(6, 60), **both(keys, values, lambda: cache(60))},
            "no multiple of 8",
        ),
        "head_dim 264": (
            {query: lambda _: heads(6, 264), **both(keys, values, lambda: cache(264))},
            "above 256",
        ),
        "5 heads on 2": ({query: lambda _: heads(5, 64)}, "no multiple of KV heads"),
        "values apart": ({values: apart}, "last dimension is not contiguous"),
    }


def of_blocks(keys, values):
    return {"blocks of 128": (both(keys, values, lambda: cache(block=128)), "multiple of 256")}


def of_indices(*names):
    found = {f"{name} int64": ({name: long}, f"{name} is not int32") for name in names}
    return found | {f"{name} apart": ({name: apart}, f"{name} is not contiguous") for name in names}


def of_table(name):
    return {
        "no block table": ({name: lambda _: None}, "block table is missing"),
        "block table int64": ({name: long}, "block table is not int32"),
        "block table apart": ({name: apart}, "block table's last dimension"),
    }


def of_lengths(*names):
    short = {f"{n} too small": ({n: lambda most: most - 1}, f"{n} is below") for n in names}
    on_device = {
        f"{n} of the device": ({n: torch.tensor}, f"{n} is no number of the host's") for n in names
    }
    return short | on_device


BREACHES = {
    "flash_attn_2": {
        **breaches_of_tensors("q", "k", "v"),
        **of_blocks("k", "v"),
        **of_indices("cu_seqlens_q", "cu_seqlens_k"),
        **of_table("block_table"),
        **of_lengths("max_seqlen_q", "max_seqlen_k"),
        "lengths of fewer": ({"cu_seqlens_k": lambda t: t[:-1]}, "cu_seqlens_k has another"),
        "no sequence": ({"cu_seqlens_q": lambda t: t[:1]}, "no sequence at all"),
        "not causal": ({"causal": lambda _: False}, "not causal"),
        "a window to the right": ({"window_size": lambda _: (4, 4)}, "window to the right"),
    },
    "flash_attn_3": {
        **breaches_of_tensors("q", "k_cache", "v_cache"),
        **of_indices("cu_seqlens_q", "cache_seqlens"),
        **of_table("page_table"),
        **of_lengths("max_seqlen_q"),
        "lengths of fewer": ({"cache_seqlens": lambda t: t[:-1]}, "cache_seqlens has another"),
        "no sequence": ({"cu_seqlens_q": lambda t: t[:1]}, "no sequence at all"),
        "starts of keys": (
            {"cu_seqlens_k": lambda _: torch.tensor([0, 40, 70], dtype=torch.int32)},
            "cu_seqlens_k beside a page table",
        ),
        "splits of a prompt": ({"num_splits": lambda _: 32}, "every position of a prompt"),
        "an append": ({"k": lambda _: heads(2, 64)}, "declared as no write"),
        "no longest": ({"max_seqlen_q": lambda _: None}, "max_seqlen_q is missing"),
        "not causal": ({"causal": lambda _: False}, "not causal"),
        "a window to the right": ({"window_size": lambda _: (4, 4)}, "window to the right"),
    },
    "torch_varlen": {
        **breaches_of_tensors("query", "key", "value"),
        **of_blocks("key", "value"),
        **of_indices("cu_seq_q", "cu_seq_k", "seqused_k"),
        **of_table("block_table"),
        **of_lengths("max_q", "max_k"),
        "no starts of keys": ({"cu_seq_k": lambda _: None}, "cu_seq_k is missing"),
        "starts of fewer": ({"cu_seq_k": lambda t: t[:-1]}, "cu_seq_k has another length"),
        "no sequence": ({"cu_seq_q": lambda t: t[:1]}, "no sequence at all"),
        "no lengths": ({"seqused_k": lambda _: None}, "seqused_k is missing"),
        "without groups": ({"enable_gqa": lambda _: False}, "enable_gqa is off"),
        "a list as window": ({"window_size": list}, "is no tuple"),
        "not causal": ({"window_size": lambda _: (-1, -1)}, "not causal"),
        "as many splits as it likes": ({"num_splits": lambda _: None}, "rows stay unwritten"),
        "two splits": ({"num_splits": lambda _: 2}, "rows stay unwritten"),
    },
}


def test_flash_attention_3_is_told_how_far_to_split_decodes():
    call, function = call_of("flash_attn_3", ((40, 1), (30, 1)))
    assert function(**call).shape == (2, 6, 64)
    with pytest.raises(ContractError, match="splits of the longest context"):
        function(**{**call, "num_splits": 0})


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_planning_and_writing_wait_for_nothing(adapter):
    """Nor does what is made of the call's arguments: all of it is captured in graphs."""
    kind, _, _ = ADAPTERS[adapter]
    backend = kind(CPU, lambda *args, **named: torch.empty(2, 6, 64))
    step = [(40, 1), (30, 1)]
    backend.allocate(KVCacheSpec(1, 2, 64, torch.bfloat16), num_blocks(step, 256), 256)
    metadata = planned(step, 256)
    with NoSync():
        backend.plan(metadata)
        backend.write_kv(0, *torch.zeros(2, 2, 2, 64).bfloat16())
        backend.attend(0, torch.zeros(2, 6, 64).bfloat16(), 0.125)
        with pytest.raises(HostSyncError):
            int(metadata.kv_lens.max())


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_what_the_adapter_calls_is_accepted(adapter):
    call, function = call_of(adapter)
    assert function(**call).shape == (12, 6, 64)


@pytest.mark.parametrize(
    ("adapter", "breach"), [(name, breach) for name in BREACHES for breach in BREACHES[name]]
)
def test_each_breach_is_refused(adapter, breach):
    """The adapter's own call with one thing changed."""
    call, function = call_of(adapter)
    changes, reason = BREACHES[adapter][breach]
    changed = {name: change(call.get(name)) for name, change in changes.items()}
    with pytest.raises(ContractError, match=reason):
        function(**{**call, **changed})


def test_flash_attention_2_is_never_told_a_number_of_splits():
    """Its varlen function takes none; with pages and splits it was wrong."""
    call, function = call_of("flash_attn_2")
    with pytest.raises(TypeError, match="num_splits"):
        function(**call, num_splits=2)


def test_the_cache_is_zeroed():
    """Kernels may multiply what no token was written to by zero: NaN would stay NaN."""
    backend = FlashAttention3Backend(CPU, contracts.flash_attn_with_kvcache)
    backend.allocate(KVCacheSpec(2, 2, 64, torch.bfloat16), 8, 16)
    assert not backend._cache.any()


@pytest.mark.parametrize(
    ("kind", "spec", "block_size", "reason"),
    [
        (FlashAttention2Backend, (64, torch.bfloat16), 16, "block_size is 16; a multiple of 256"),
        (TorchVarlenBackend, (64, torch.bfloat16), 384, "block_size is 384; a multiple of 256"),
        (FlashAttention3Backend, (60, torch.bfloat16), 16, "head_dim is 60; a multiple of 8"),
        (FlashAttention3Backend, (264, torch.bfloat16), 16, "head_dim is 264; a multiple of 8 up"),
        (FlashAttention3Backend, (64, torch.float32), 16, "dtype is torch.float32"),
    ],
)
def test_a_cache_that_it_could_not_read_is_refused(kind, spec, block_size, reason):
    with pytest.raises(ValueError, match=reason):
        kind(CPU, None).allocate(KVCacheSpec(1, 2, *spec), 8, block_size)
