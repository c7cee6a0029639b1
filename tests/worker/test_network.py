"""The backend is the fastest that can compute the model, or the one that was asked for."""

import pytest
import torch

from noria.plan.memory import host_memory
from tests.support.native import kernels
from tests.support.tiny_families import tiny_family
from worker.config import WorkerConfig
from worker.model_runner import ModelRunner
from worker.network import load_network


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny models by case, written once."""
    made = {}

    def folder(case):
        if case not in made:
            made[case] = tmp_path_factory.mktemp("tiny")
            tiny_family(case).save_pretrained(made[case])
        return made[case]

    return folder


def load(model, stages=None, **settings):
    def progress(stage, done, total):
        del done, total
        if stages is not None and stage not in stages:
            stages.append(stage)

    config = WorkerConfig(model=model, max_num_seqs=2, **settings)
    return load_network(config, host_memory(), progress)


def computes(network):
    network.backend.allocate(network.size.spec, 4, network.size.block_size)
    ModelRunner(network.model, network.backend, network.size.block_size).warm_up()
    return True


def test_a_model_of_llama_s_shape_runs_on_the_kernels_in_bfloat16(folders):
    kernels("auto")
    stages = []
    network = load(folders("llama"), stages)
    assert (network.backend.name, network.backend.row_exact) == ("cpu_native", True)
    assert (network.dtype, network.passed_over) == ("bfloat16", ())
    assert stages == ["compiling kernels", "loading weights"]
    assert network.size.spec.dtype is torch.bfloat16
    assert network.model.weight_bytes == network.weight_bytes > 0
    assert computes(network)


def test_torch_runs_what_it_is_asked_to_in_float32(folders):
    network = load(folders("llama"), attention_backend="torch")
    assert (network.backend.name, network.dtype) == ("torch", "float32")
    assert network.passed_over == ()
    assert computes(network)


@pytest.mark.parametrize(
    ("case", "settings", "reason"),
    [
        ("gemma3", {}, "architecture gemma3 is none of"),
        ("llama", {"dtype": "float32"}, "dtype float32 was asked for"),
        ("llama", {"block_size": 4}, "block_size 4 is no multiple of 16"),
        ("gpt2", {}, "computed by transformers' own code"),
    ],
)
def test_what_the_kernels_cannot_do_runs_on_torch_and_says_why(folders, case, settings, reason):
    network = load(folders(case), **settings)
    assert network.backend.name == "torch"
    assert reason in "; ".join(network.passed_over)
    assert computes(network)
    with pytest.raises(ValueError, match=f"cpu_native cannot be used: .*{reason}"):
        load(folders(case), attention_backend="cpu_native", **settings)


def test_without_a_compiler_it_runs_on_torch_and_says_so(folders, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("NORIA_CACHE_DIR", str(tmp_path))
    network = load(folders("llama"))
    assert (network.backend.name, network.dtype) == ("torch", "float32")
    assert "no C++ compiler found (looked for CXX = /nowhere/c++)" in network.passed_over[0]


@pytest.mark.parametrize("variant", ["avx512", "avx2"])
def test_a_variant_can_be_asked_for(folders, variant):
    network = load(folders("llama"), cpu_kernels=variant)
    assert network.kernels == variant or "the CPU has no" in network.passed_over[0]


@pytest.mark.parametrize("field", ["attention_backend", "cpu_kernels", "dtype"])
def test_unknown_choices_are_refused_by_name(tmp_path, field):
    with pytest.raises(ValueError, match=f"{field} is 'best', one of auto"):
        WorkerConfig(model=tmp_path, **{field: "best"})
