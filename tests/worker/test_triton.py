"""The Triton kernels beyond the suite: turning and writing in one, whole models, Hopper's code."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

from bench.gpu.conformance import CPU, NUM_BLOCKS, planned
from tests.support.backends import triton_backend
from tests.support.no_sync import HostSyncError, NoSync, fake_cuda
from tests.support.tiny_families import tiny_family
from worker.attention.base import KVCacheSpec
from worker.attention.torch_backend import TorchBackend
from worker.attention.triton_tiles import (
    HEAD_DIMS,
    MAX_SPLITS,
    SPLIT,
    num_splits,
    prefill_tile,
    split_size,
)
from worker.models.layers import rotate, rotation
from worker.models.loader import open_checkpoint

STEP = [(40, 1), (30, 11)]


def made(spec, block_size=16):
    backend = triton_backend().TritonBackend(CPU)
    backend.allocate(spec, NUM_BLOCKS, block_size)
    return backend


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 80), (4, 32)])
def test_turning_and_writing_in_one_is_the_same_as_one_after_the_other(group, head_dim):
    spec, metadata = KVCacheSpec(2, 2, head_dim, torch.float32), planned(STEP, 16)
    one, other = made(spec), made(spec)
    heads, value = torch.randn(12, 2 * group + 4, head_dim).split([2 * group + 2, 2], 1)
    by = rotation(metadata.positions, 1.0 / 1e4 ** torch.linspace(0, 1, head_dim // 2))
    for backend in (one, other):
        backend.plan(metadata)
    query = one.rotate_and_write(1, heads, value, by.cos, by.sin)
    turned = rotate(heads, by)
    other.write_kv(1, turned[:, 2 * group :], value)
    assert torch.allclose(query, turned[:, : 2 * group], atol=1e-6)
    assert torch.allclose(one._cache, other._cache, atol=1e-6)
    assert one._cache[:, 1].any()
    assert not one._cache[:, 0].any()


def test_turning_writes_nothing_for_a_position_without_a_slot():
    spec, metadata = KVCacheSpec(1, 2, 64, torch.float32), planned(STEP, 16)
    metadata.slot_mapping[:] = -1
    backend = made(spec)
    backend.plan(metadata)
    angles = torch.ones(12, 1, 32)
    query = backend.rotate_and_write(
        0, torch.randn(12, 8, 64), torch.randn(12, 2, 64), angles, angles
    )
    assert query.all()
    assert not backend._cache.any()


@pytest.mark.parametrize(
    "case",
    ["mistral, window", *(pytest.param(c, marks=pytest.mark.soak) for c in ("llama", "qwen3"))],
)
def test_a_model_gives_the_hidden_states_that_it_gives_on_torch(case, tmp_path):
    """A prefill and a decode of two sequences; rotation goes through the kernel."""
    tiny_family(case).save_pretrained(tmp_path)
    model = open_checkpoint(tmp_path).load()
    given = []
    for backend in (made(model.kv_spec), TorchBackend()):
        if isinstance(backend, TorchBackend):
            backend.allocate(model.kv_spec, NUM_BLOCKS, 16)
        for step in ([(14, 14), (2, 2)], [(15, 1), (3, 1)]):
            metadata = planned(step, 16)
            backend.plan(metadata)
            ids = 3 + torch.arange(len(metadata.positions)) % 50
            with torch.inference_mode():
                given.append(model.forward(ids, metadata.positions, backend))
    for ours, theirs in zip(given[:2], given[2:], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4), (ours - theirs).abs().max()


def test_splits_follow_from_a_row_s_own_keys_and_stay_few():
    for seen in (*range(1, 3 * SPLIT), 8191, 8192, 8193, 40_000, 131_072, 1_000_000):
        size, count = split_size(seen), num_splits(seen)
        assert size % SPLIT == 0
        assert (count - 1) * size < seen <= count * size
        assert 1 <= count <= MAX_SPLITS
    assert num_splits(0) == 0


def test_no_row_has_more_splits_than_are_launched():
    """Rows up to some length: the longest is not the one of most splits."""
    most_splits = triton_backend().most_splits
    most = 0
    for longest in range(1, 40 * SPLIT, 37):
        most = max(most, num_splits(longest))
        assert most <= most_splits(longest) <= MAX_SPLITS


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16, 71, 128, 200])
def test_a_tile_has_room_for_a_position_of_any_group(group):
    for head_dim in HEAD_DIMS:
        tile = prefill_tile(group, head_dim, 2)
        assert tile.rows // group >= 1
        assert tile.rows & (tile.rows - 1) == 0


@pytest.mark.parametrize(
    ("spec", "block_size", "reason"),
    [
        ((72, torch.bfloat16), 16, "head_dim is 72; one of"),
        ((64, torch.float64), 16, "dtype is torch.float64; one of"),
        ((64, torch.bfloat16), 24, "block_size is 24; a multiple of 16"),
    ],
)
def test_a_cache_that_the_kernels_could_not_read_is_refused(spec, block_size, reason):
    with pytest.raises(ValueError, match=reason):
        made(KVCacheSpec(1, 2, *spec), block_size)


class Launches:
    """In a kernel's place: launched with anything, it counts."""

    def __init__(self):
        self.count = 0

    def __getitem__(self, grid):
        assert all(isinstance(size, int) for size in grid)
        return self._launch

    def _launch(self, *args, **named):
        self.count += 1


@pytest.fixture
def launches(monkeypatch):
    found = Launches()
    for name in ("attention_kernel", "combine_kernel", "write_kernel", "rotate_and_write_kernel"):
        monkeypatch.setattr(triton_backend(), name, found)
    return found


@pytest.mark.parametrize("window", [None, 300])
def test_no_step_waits_for_the_device(launches, window):
    """Of decodes with splits beside chunks, on tensors of which nobody can read a number."""
    metadata = planned([(400, 1), (3, 1), (30, 11)], 16)
    with fake_cuda():
        device = torch.device("cuda")
        fakes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            for name, tensor in (
                (field.name, getattr(metadata, field.name)) for field in fields(metadata)
            )
            if isinstance(tensor, torch.Tensor)
        }
        backend = triton_backend().TritonBackend(device)
        backend.allocate(KVCacheSpec(1, 2, 64, torch.bfloat16), 64, 16)
        heads = torch.empty(13, 10, 64, dtype=torch.bfloat16, device=device)
        angles = torch.empty(13, 1, 32, device=device)
        with NoSync():
            backend.plan(replace(metadata, **fakes))
            backend.write_kv(0, heads[:, :2], heads[:, :2])
            query = backend.rotate_and_write(0, heads[:, :8], heads[:, 8:], angles, angles)
            assert backend.attend(0, query, 0.125, window).shape == (13, 6, 64)
            with pytest.raises(HostSyncError):
                fakes["kv_lens"].max().item()
    # Write, turn, split decodes, combine, chunks.
    assert launches.count == 5


def uninterpreted(*arguments):
    """What Python prints in a process where kernels are compiled."""
    pytest.importorskip("triton", reason="triton is not installed: pip install noria[gpu]")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def compiled(*arguments):
    """The kernels as bench.gpu.compile tells of them."""
    lines = uninterpreted("-m", "bench.gpu.compile", "--json", *arguments).splitlines()
    return [json.loads(line) for line in lines]


KERNELS = ("prefill", "decode", "decode, split", "combine", "write", "rotate_and_write")


@pytest.mark.parametrize(
    "only", [("prefill", "decode, split"), pytest.param(KERNELS, marks=pytest.mark.soak)]
)
def test_kernels_compile_for_hopper_within_its_limits(only):
    found = {k["kernel"]: k for k in compiled(*(f"--only={name}" for name in only))}
    assert set(found) == set(only)
    for kernel in found.values():
        assert kernel["cubin"] > 0
        assert 0 < kernel["registers"] <= 255
        assert kernel["spilled"] == 0
        assert kernel["shared"] <= 227 * 1024
    assert found["prefill"]["wgmma"] > 0
    assert found["prefill"]["mma"] == 0
    assert found["decode, split"]["mma"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("window", [None, 512])
def test_no_step_has_a_kernel_compiled_that_another_did_not_need(window):
    """Whatever the number of its rows: a compilation would stall everyone's step."""
    script = (
        "import torch; from bench.gpu.compile import Shape, num_variants;"
        f"print(num_variants(Shape(128, torch.bfloat16, window={window})))"
    )
    found = ast.literal_eval(uninterpreted("-c", script))
    assert len(found) == 6
    assert set(found.values()) == {1}, found


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_kernel_compiles_for_each_head_size_and_dtype_claimed():
    """The prefill of each in bfloat16 and float16 uses wgmma."""
    found = compiled("--full")
    claimed = {(k["head_dim"], k["dtype"], k["windowed"]) for k in found}
    kinds = ("bfloat16", "float16", "float32")
    assert claimed >= {(d, t, w) for d in HEAD_DIMS for t in kinds for w in (False, True)}
    assert [k for k in found if k["faults"] or not k["cubin"]] == []
    assert all(k["wgmma"] for k in found if k["kernel"] == "prefill" and k["dtype"] != "float32")
