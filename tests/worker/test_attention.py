"""The torch backend gives what attention's definition gives, for every kind of step."""

import pytest
import torch

from tests.support.attention_steps import NAN, NUM_BLOCKS, STEPS, planned, write
from worker.attention import torch_backend
from worker.attention.base import KVCacheSpec
from worker.attention.reference import ReferenceBackend
from worker.attention.torch_backend import TorchBackend, _buckets_by_length


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
