"""What every attention backend does, whichever it is: one suite, against attention's definition.

The cases stand in bench/gpu/conformance.py, which a GPU machine runs without pytest; the backends
in tests/support/backends.py. Where one declares `row_exact`, its bits are compared too.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.gpu.conformance import (
    NAN,
    NUM_BLOCKS,
    PROPERTIES,
    STEPS,
    Case,
    DeviationError,
    cases,
    check,
    check_decode_alone,
    planned,
)  # fmt: skip
from tests.support.backends import FLASH, ON_CPU, TRITON, native, torch_subject
from tests.support.native import VARIANT_NAMES
from worker.attention.base import KVCacheSpec
from worker.attention.torch_backend import TorchBackend

BACKENDS = {**ON_CPU, **FLASH, **TRITON}
# Interpreted kernels take milliseconds a program: these in every run, the rest in `make soak`.
INTERPRETED = {
    "triton, interpreted": ("9 heads on 3 of 64", "mixed, window 4", "long decodes, alone"),
    "triton bfloat16, interpreted": ("mixed",),
    "triton float16, interpreted": ("chunk with prefix",),
}


def pairs():
    """Every backend with every case."""
    for (backend, subject), (name, case) in itertools.product(BACKENDS.items(), cases().items()):
        slow = backend in INTERPRETED and name not in INTERPRETED[backend]
        marks = [pytest.mark.soak] if slow else []
        yield pytest.param(subject, case, id=f"{backend}: {name}", marks=marks)


def some(*backends, but=()):
    """A parameter of a test: these backends, or all; interpreted ones only in the long form."""
    found = {name: BACKENDS[name] for name in backends or BACKENDS if name not in but}
    slow = {name: [pytest.mark.soak] if name in INTERPRETED else [] for name in found}
    made = [pytest.param(found[name], id=name, marks=slow[name]) for name in found]
    return pytest.mark.parametrize("case", made)


@pytest.mark.parametrize(("subject", "case"), list(pairs()))
def test_every_case(subject, case):
    """Through permuted blocks, and with NaN in every slot that holds no token."""
    check(subject, case)


@pytest.mark.parametrize("case", [*FLASH.values(), TRITON["triton, interpreted"]])
def test_rows_without_keys_give_zeros(case):
    """CUDA graphs fill batches up with them."""
    PROPERTIES["padding rows"](case)


@some()
def test_which_blocks_hold_a_sequence_changes_no_bit(case):
    PROPERTIES["permuted blocks"](case)


@some()
def test_sequences_may_share_their_first_blocks(case):
    PROPERTIES["shared blocks"](case)


def test_a_decoding_row_has_the_same_bits_in_any_batch():
    """Its keys are split by its own length: one split beside a row of several, and so on."""
    check_decode_alone(TRITON["triton, interpreted"], [256, 257], [300])


@some(*TRITON)
def test_a_decoding_row_of_any_length_has_the_same_bits_in_any_batch(case):
    check_decode_alone(case)


def test_the_suite_notices_a_wrong_row():
    class Wrong(TorchBackend):
        def attend(self, *args):
            attended = super().attend(*args)
            attended[2] += 1e-3
            return attended

    subject = torch_subject(torch.float32, 2e-5)
    wrong = type(subject)(Wrong, subject.dtype, subject.tolerance, subject.memory)
    with pytest.raises(DeviationError, match=r"deviates by 0\.00.*, most in row 2"):
        check(wrong, Case(STEPS["mixed"]))


# FlashAttention reads whole tiles of keys, and multiplies those before the window by zero.
@pytest.mark.parametrize("window", [1, 4, 5, 16])
@some(but=FLASH)
def test_what_left_the_window_is_not_read(case, window):
    """Its keys and values may be NaN, also beside the first that is seen, and so may
    what lies beyond the sequence: neither is multiplied, not even by zero.
    """
    sequence = Sequence(41, dtype=case.dtype)
    for tensor in (sequence.key, sequence.value):
        tensor[: 39 - window] = NAN
    ours = filled_with_nan(case, sequence.spec)
    assert sequence.attended(ours, [38, 3], window=window)[38:].isfinite().all()


@some()
def test_a_step_writes_to_its_own_slots_only(case):
    spec = KVCacheSpec(1, 2, 64, case.dtype)
    ours, metadata = case.make(), planned(STEPS["mixed"], case.block_size)
    ours.allocate(spec, NUM_BLOCKS, case.block_size)
    for cache in case.memory(ours):
        cache.zero_()
    ours.plan(metadata)
    ones = torch.ones(len(metadata.positions), 2, 64, dtype=case.dtype)
    ours.write_kv(0, ones, ones)
    assert sum(int((cache != 0).sum()) for cache in case.memory(ours)) == 2 * ones.numel()


@pytest.mark.parametrize(("blocks", "size", "name"), [(0, 256, "num_blocks"), (4, 0, "block_size")])
@some()
def test_impossible_sizes_are_named(case, blocks, size, name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        case.make().allocate(KVCacheSpec(1, 1, 64, case.dtype), blocks, size)


@some()
def test_too_large_a_cache_is_refused_with_its_bytes(case):
    spec = KVCacheSpec(100, 100, 128, case.dtype)
    with pytest.raises(ValueError, match=r"num_blocks 100000000: no memory for \d+ bytes"):
        case.make().allocate(spec, 100_000_000, case.block_size)


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
            backend.plan(planned(step, 16, at, blocks))
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
@some(*ON_CPU)
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


@some(*ON_CPU)
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
