"""The backend is the fastest that can compute the model, or the one that was asked for."""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from noria.models.config import ConfigError
from noria.plan.memory import host_memory
from tests.support.native import kernels
from tests.support.tiny_families import VOCAB, tiny_family
from tests.support.tiny_models import randomised
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


def test_a_model_that_keeps_other_keys_and_values_than_its_config_says_is_refused(tmp_path):
    """Latent attention: heads of a size that its config does not name."""
    config = DeepseekV2Config(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=64, eos_token_id=2, intermediate_size=64,
        kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32,
        first_k_dense_replace=1,
    )  # fmt: skip
    randomised(DeepseekV2ForCausalLM, config).save_pretrained(tmp_path)
    words = r"describes K and V of 1 layers x 3 KV heads x 16 .* keeps 1 layers x 3 KV heads x 32"
    with pytest.raises(ConfigError, match=words):
        load(tmp_path)


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
