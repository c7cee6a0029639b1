"""The torch backend gives what attention's definition gives, for every kind of step."""

import pytest
import torch

from worker.attention import torch_backend
from worker.attention.base import KVCacheSpec
from worker.attention.reference import ReferenceBackend
from worker.attention.torch_backend import TorchBackend, _buckets_by_length
from worker.input_batch import build_input_batch
from worker.sequence import ScheduledSequence, SchedulerOutput

NUM_BLOCKS = 320
NAN = float("nan")

# (kv_len after the step, positions computed in it) per sequence, single positions first.
STEPS = {
    "pure decode": [(1, 1), (7, 1), (33, 1), (34, 1)],
    "decode of equal lengths": [(21, 1), (21, 1)],
    "decode, lengths far apart": [(350, 1), (3, 1), (320, 1), (20, 1)],
    "prefill": [(19, 19), (5, 5)],
    "chunk with prefix": [(45, 9)],
    "mixed": [(50, 1), (1, 1), (30, 11), (8, 8)],
    "lengths at a multiple of the block": [(16, 1), (32, 1), (32, 16), (16, 16)],
}


def planned(step, block_size, seed=0):
    """The step's metadata over permuted, non-contiguous blocks."""
    generator = torch.Generator().manual_seed(seed)
    free = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()
    entries = []
    for index, (kv_len, count) in enumerate(step):
        blocks = [free.pop() for _ in range(-(-kv_len // block_size))]
        entries.append(ScheduledSequence(index, [0] * count, kv_len - count, blocks, None))
    output = SchedulerOutput(1, tuple(entries), sum(count for _, count in step))
    return build_input_batch(output, block_size).metadata


def both_backends(spec, block_size, step):
    """Both with the same prefixes written; every slot that is not is NaN."""
    ours, reference = TorchBackend(), ReferenceBackend()
    for backend in (ours, reference):
        backend.allocate(spec, NUM_BLOCKS, block_size)
    for cache in (ours._keys, ours._values, reference.keys, reference.values):
        cache.fill_(NAN)
    prefixes = [(kv_len, kv_len) for kv_len, _ in step]
    write(spec, planned(prefixes, block_size), ours, reference)
    return ours, reference


def write(spec, metadata, *backends):
    """The same random K and V of all layers into each of the backends."""
    torch.manual_seed(3)
    shape = (len(metadata.positions), spec.num_kv_heads, spec.head_dim)
    for backend in backends:
        backend.plan(metadata)
    for layer in range(spec.num_layers):
        key, value = torch.randn(shape).to(spec.dtype), torch.randn(shape).to(spec.dtype)
        for backend in backends:
            backend.write_kv(layer, key, value)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 128)])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_it_equals_the_reference(step, group, head_dim, block_size):
    """Also through permuted blocks, and with NaN in every slot that holds no token."""
    assert_equals_reference(KVCacheSpec(2, 2, head_dim, torch.float32), group, block_size, step)


@pytest.mark.parametrize("step", [[(62, 60), (30, 30)], [(33, 1), (64, 16), (100, 9)]])
def test_long_chunks_are_cut_into_query_blocks(step, monkeypatch):
    """Several blocks of queries per chunk, and a mask that has to grow."""
    monkeypatch.setattr(torch_backend, "_QUERY_BLOCK", 8)
    monkeypatch.setattr(torch_backend, "_MIN_MASK_WIDTH", 16)
    assert_equals_reference(KVCacheSpec(1, 2, 64, torch.float32), 3, 4, step)


@pytest.mark.parametrize("window", [1, 4, 16, 17, 40, 1000])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_window_shows_the_last_positions_only(step, window):
    """Windows smaller and larger than blocks, chunks and sequences."""
    assert_equals_reference(KVCacheSpec(1, 2, 64, torch.float32), 3, 16, step, (window,))


@pytest.mark.parametrize("step", [[(62, 60), (30, 30)], [(33, 1), (64, 16), (100, 9)]])
def test_windows_and_query_blocks_together(step, monkeypatch):
    """Layers of several windows in one step; each block of queries has its own first key."""
    monkeypatch.setattr(torch_backend, "_QUERY_BLOCK", 8)
    monkeypatch.setattr(torch_backend, "_MIN_MASK_WIDTH", 16)
    spec = KVCacheSpec(4, 2, 64, torch.float32)
    assert_equals_reference(spec, 3, 4, step, (5, None, 23, 5))


def test_what_left_the_window_is_not_read():
    """Keys and values before it may be NaN: a backend could have freed them."""
    spec, metadata = KVCacheSpec(1, 2, 64, torch.float32), planned([(40, 1), (50, 8)], 4)
    backend, _ = both_backends(spec, 4, [(40, 1), (50, 8)])
    write(spec, metadata, backend)
    for row, first in ((0, 40 - 6), (1, 42 - 6 + 1)):
        positions = torch.arange(first)
        slots = metadata.block_table[row, positions // 4] * 4 + positions % 4
        backend._keys[0, slots] = backend._values[0, slots] = NAN
    assert backend.attend(0, torch.randn(9, 4, 64), 0.125, window=6).isfinite().all()


def assert_equals_reference(spec, group, block_size, step, windows=(None, None)):
    head_dim = spec.head_dim
    backends = both_backends(spec, block_size, step)
    metadata = planned(step, block_size)
    write(spec, metadata, *backends)
    torch.manual_seed(4)
    for layer, window in zip(range(spec.num_layers), windows, strict=False):
        query = torch.randn(len(metadata.positions), 2 * group, head_dim)
        ours, theirs = (b.attend(layer, query, head_dim**-0.5, window) for b in backends)
        assert torch.allclose(ours, theirs, atol=2e-5), (ours - theirs).abs().max()


def test_lower_precision_stays_near_the_reference():
    spec = KVCacheSpec(1, 2, 64, torch.bfloat16)
    step = STEPS["mixed"]
    backends = both_backends(spec, 16, step)
    metadata = planned(step, 16)
    write(spec, metadata, *backends)
    query = torch.randn(len(metadata.positions), 6, 64).bfloat16()
    ours, theirs = (backend.attend(0, query, 0.125) for backend in backends)
    assert ours.dtype is torch.bfloat16
    assert torch.allclose(ours.float(), theirs.float(), atol=2e-2)


def test_a_query_sees_no_position_after_its_own():
    """Changing K and V of the last position changes nothing but the last output."""
    spec = KVCacheSpec(1, 2, 64, torch.float32)
    backend, _ = both_backends(spec, 4, [(30, 30)])
    metadata = planned([(30, 30)], 4)
    write(spec, metadata, backend)
    query = torch.randn(30, 4, 64)
    before = backend.attend(0, query, 0.125)
    last = metadata.slot_mapping[-1]
    backend._keys[0, last] += 1.0
    backend._values[0, last] -= 2.0
    after = backend.attend(0, query, 0.125)
    assert torch.equal(before[:-1], after[:-1])
    assert not torch.equal(before[-1], after[-1])


def test_a_step_writes_to_its_own_slots_only():
    spec = KVCacheSpec(1, 2, 64, torch.float32)
    backend, metadata = TorchBackend(), planned(STEPS["mixed"], 4)
    backend.allocate(spec, NUM_BLOCKS, 4)
    backend._keys.fill_(0.0)
    backend.plan(metadata)
    ones = torch.ones(len(metadata.positions), 2, 64)
    backend.write_kv(0, ones, ones)
    written = backend._keys[0].sum(dim=(1, 2)).nonzero().flatten()
    assert written.tolist() == sorted(metadata.slot_mapping.tolist())


def test_buckets_hold_every_row_once_and_bound_the_padding():
    lens = [1 + (index * 7919) % 3000 for index in range(200)]
    buckets = _buckets_by_length(lens)
    assert sorted(row for bucket in buckets for row in bucket) == list(range(200))
    for bucket in buckets:
        padded = max(lens[row] for row in bucket) * len(bucket)
        used = sum(lens[row] for row in bucket)
        assert padded <= 512 or (padded <= 1.25 * used and padded <= 8192)
    assert len(buckets) < 100


def test_a_sequence_longer_than_a_bucket_has_one_of_its_own():
    assert _buckets_by_length([20_000, 20_000, 5]) == [[0], [1], [2]]


@pytest.mark.parametrize(("blocks", "size", "name"), [(0, 16, "num_blocks"), (4, 0, "block_size")])
def test_impossible_sizes_are_named(blocks, size, name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        TorchBackend().allocate(KVCacheSpec(1, 1, 64, torch.float32), blocks, size)


def test_too_large_a_cache_is_refused_with_its_bytes():
    spec = KVCacheSpec(100, 100, 128, torch.float32)
    with pytest.raises(ValueError, match=r"num_blocks 100000000: no memory for \d+ bytes"):
        TorchBackend().allocate(spec, 100_000_000, 16)
