"""What every attention backend does, whichever it is: one suite, against attention's definition.

A backend joins by a line in BACKENDS. Where it declares `row_exact`, its bits are compared too.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.attention_steps import NAN, NUM_BLOCKS, STEPS, planned, write
from tests.support.native import VARIANT_NAMES, kernels
from worker.attention.base import KVCacheSpec
from worker.attention.reference import ReferenceBackend
from worker.attention.torch_backend import TorchBackend
from worker.native.backend import NativeBackend

# Longer than any split of keys that a backend might make, in few rows.
LONG_STEPS = {
    "long decodes, alone": [(1300, 1)],
    "long decodes beside short ones": [(1025, 1), (512, 1), (513, 1), (7, 1)],
    "a chunk across many keys": [(1040, 3)],
}


@dataclass(frozen=True)
class Case:
    """A backend, the dtype of its cache, and how far fp32 arithmetic on the same values may be.

    `memory` gives the tensors that a test may fill with NaN before anything is written.
    """

    make: Callable[[], Any]
    dtype: torch.dtype
    tolerance: float
    memory: Callable[[Any], list[torch.Tensor]]


def torch_memory(backend):
    return [backend._keys, backend._values]


def native(variant, threads=2):
    tolerance = 2e-2 if variant == "avx512_bf16" else 2e-5
    return Case(
        lambda: NativeBackend(kernels(variant, threads)), torch.bfloat16, tolerance,
        lambda backend: [backend._memory],
    )  # fmt: skip


BACKENDS = {
    "torch": Case(TorchBackend, torch.float32, 2e-5, torch_memory),
    "torch bfloat16": Case(TorchBackend, torch.bfloat16, 2e-2, torch_memory),
    **{f"cpu_native {variant}": native(variant) for variant in VARIANT_NAMES},
    "cpu_native, one thread": native("avx2", 1),
    "cpu_native, more threads than cores": native("avx2", 5),
}


@pytest.fixture(scope="module", params=BACKENDS.values(), ids=BACKENDS)
def case(request):
    return request.param


def both(case, spec, block_size, step):
    """The backend and the oracle with the same prefixes; every slot that is not one is NaN."""
    ours, oracle = case.make(), ReferenceBackend()
    for backend in (ours, oracle):
        backend.allocate(spec, NUM_BLOCKS, block_size)
    for cache in (*case.memory(ours), oracle.keys, oracle.values):
        cache.fill_(NAN)
    write(spec, planned([(kv_len, kv_len) for kv_len, _ in step], block_size), ours, oracle)
    return ours, oracle


def assert_conforms(case, step, *, heads=(6, 2), head_dim=64, block_size=16, windows=(None, None)):
    num_heads, kv_heads = heads
    spec = KVCacheSpec(len(windows), kv_heads, head_dim, case.dtype)
    ours, oracle = both(case, spec, block_size, step)
    metadata = planned(step, block_size)
    write(spec, metadata, ours, oracle)
    torch.manual_seed(4)
    for layer, window in enumerate(windows):
        query = torch.randn(len(metadata.positions), num_heads, head_dim).to(case.dtype)
        attended = ours.attend(layer, query, head_dim**-0.5, window)
        expected = oracle.attend(layer, query.float(), head_dim**-0.5, window)
        assert attended.dtype is case.dtype
        assert attended.shape == query.shape
        rounding = 2**-8 if case.dtype is torch.bfloat16 else 0
        assert torch.allclose(attended.float(), expected, atol=case.tolerance, rtol=rounding)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_steps_of_every_kind(case, step):
    """Through permuted blocks, and with NaN in every slot that holds no token."""
    assert_conforms(case, step)


@pytest.mark.parametrize("step", LONG_STEPS.values(), ids=LONG_STEPS)
def test_long_sequences(case, step):
    assert_conforms(case, step, heads=(3, 1), windows=(None, 600))


@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((2, 2), 64), ((9, 3), 64), ((4, 1), 128), ((7, 1), 32), ((16, 1), 96), ((10, 2), 256)],
)
def test_heads_of_every_number_and_size(case, heads, head_dim):
    step = [(18, 1), (5, 1), (21, 17)]
    assert_conforms(case, step, heads=heads, head_dim=head_dim, windows=(None,))


@pytest.mark.parametrize("window", [1, 4, 16, 17, 40, 1000])
@pytest.mark.parametrize("name", ["mixed", "decode, lengths far apart"])
def test_windows(case, name, window):
    """Smaller and larger than groups of keys, chunks and sequences; layers differ."""
    assert_conforms(case, STEPS[name], windows=(window, None))


def test_larger_blocks(case):
    assert_conforms(case, STEPS["mixed"], block_size=32)


@pytest.mark.parametrize("window", [1, 4, 5, 16])
def test_what_left_the_window_is_not_read(case, window):
    """Its keys and values may be NaN, also beside the first that is seen, and so may
    what lies beyond the sequence: neither is multiplied, not even by zero.
    """
    sequence = Sequence(41, dtype=case.dtype)
    for tensor in (sequence.key, sequence.value):
        tensor[: 39 - window] = NAN
    ours = filled_with_nan(case, sequence.spec)
    assert sequence.attended(ours, [38, 3], window=window)[38:].isfinite().all()


def test_a_step_writes_to_its_own_slots_only(case):
    spec = KVCacheSpec(1, 2, 64, case.dtype)
    ours, metadata = case.make(), planned(STEPS["mixed"], 16)
    ours.allocate(spec, NUM_BLOCKS, 16)
    for cache in case.memory(ours):
        cache.zero_()
    ours.plan(metadata)
    ones = torch.ones(len(metadata.positions), 2, 64, dtype=case.dtype)
    ours.write_kv(0, ones, ones)
    assert sum(int((cache != 0).sum()) for cache in case.memory(ours)) == 2 * ones.numel()


@pytest.mark.parametrize(("blocks", "size", "name"), [(0, 16, "num_blocks"), (4, 0, "block_size")])
def test_impossible_sizes_are_named(case, blocks, size, name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        case.make().allocate(KVCacheSpec(1, 1, 64, case.dtype), blocks, size)


def test_too_large_a_cache_is_refused_with_its_bytes(case):
    spec = KVCacheSpec(100, 100, 128, case.dtype)
    with pytest.raises(ValueError, match=r"num_blocks 100000000: no memory for \d+ bytes"):
        case.make().allocate(spec, 100_000_000, 16)


class Sequence:
    """One sequence's queries, keys and values, attended over in any cut and beside others."""

    def __init__(self, length, heads=(6, 2), head_dim=64, dtype=torch.bfloat16):
        generator = torch.Generator().manual_seed(length)
        self.length, self.spec = length, KVCacheSpec(1, heads[1], head_dim, dtype)
        self.query, self.key, self.value = (
            torch.randn(length, count, head_dim, generator=generator).to(dtype)
            for count in (heads[0], heads[1], heads[1])
        )

    def attended(self, backend, cuts, others=(), window=None):
        """The output of all positions, one step per cut; beside each, `others` decode."""
        blocks, rows, at = list(range(NUM_BLOCKS, NUM_BLOCKS + 99))[::-1], [], 0
        for count in cuts:
            mine, step = slice(at, at + count), [*((n, 1) for n in others), (at + count, count)]
            backend.plan(planned(step, 16, seed=at, last_blocks=blocks))
            beside = torch.randn(len(others), *self.query.shape[1:]).to(self.spec.dtype)
            kv = beside[:, : self.spec.num_kv_heads]
            key, value = torch.cat([kv, self.key[mine]]), torch.cat([kv, self.value[mine]])
            backend.write_kv(0, key, value)
            query = torch.cat([beside, self.query[mine]])
            rows.append(backend.attend(0, query, 0.125, window)[len(others) :])
            at += count
        return torch.cat(rows)


def filled_with_nan(case, spec):
    backend = case.make()
    backend.allocate(spec, NUM_BLOCKS + 99, 16)
    for cache in case.memory(backend):
        cache.fill_(NAN)
    return backend


LONG = Sequence(700)
CUTS = st.lists(st.integers(1, 300), min_size=1, max_size=8)
OTHERS = st.lists(st.integers(1, 90), max_size=4)


@pytest.mark.parametrize("window", [None, 37, 520])
@settings(max_examples=8, deadline=None)
@given(cuts=CUTS, others=OTHERS)
def test_a_row_has_the_same_bits_in_any_cut_and_beside_anything(case, window, cuts, others):
    """Where the backend declares it: one chunk, several, single positions, other threads."""
    backend = filled_with_nan(case, LONG.spec)
    if not backend.row_exact:
        pytest.skip("not declared")
    ends = [end for end in itertools.accumulate(cuts) if end < LONG.length]
    starts = [0, *ends]
    cuts = [end - start for start, end in itertools.pairwise([*starts, LONG.length])]
    whole = LONG.attended(filled_with_nan(case, LONG.spec), [LONG.length], window=window)
    assert torch.equal(LONG.attended(backend, cuts, others, window), whole)


def test_single_positions_have_the_bits_of_a_whole_chunk(case):
    backend, sequence = filled_with_nan(case, LONG.spec), Sequence(70)
    if not backend.row_exact:
        pytest.skip("not declared")
    whole = sequence.attended(filled_with_nan(case, LONG.spec), [70])
    assert torch.equal(sequence.attended(backend, [1] * 70), whole)


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_the_number_of_threads_changes_no_bit(variant):
    """Also where splits of one long sequence are computed by different threads."""
    sequence = Sequence(1500, heads=(3, 1))
    alone = sequence.attended(filled_with_nan(native(variant, 1), sequence.spec), [1400, 99, 1])
    for threads in (2, 5):
        backend = filled_with_nan(native(variant, threads), sequence.spec)
        assert torch.equal(sequence.attended(backend, [1400, 99, 1]), alone)
