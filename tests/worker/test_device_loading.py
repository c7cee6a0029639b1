"""Weights go to a device as they are read: the host never holds the model."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

SIZE, COUNT = 8 << 20, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two shards of bf16, 128 MiB together."""
    path, shape, of = tmp_path_factory.mktemp("shards"), (SIZE // 2 // 1024, 1024), {}
    for shard in range(2):
        file = f"model-{shard + 1}-of-2.safetensors"
        names = [f"{shard}.{i}" for i in range(COUNT // 2)]
        save_file({n: torch.ones(shape, dtype=torch.bfloat16) for n in names}, path / file)
        of |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))
    return path


def test_the_host_holds_a_few_tensors_at_a_time(folder):
    """The host's own weights show that more would be seen."""
    command = [sys.executable, "-m", "tests.support.loading", str(folder), "bfloat16"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    added = json.loads(told.stdout)
    assert added["device"] < 4 * SIZE
    assert added["host"] > 0.9 * COUNT * SIZE
