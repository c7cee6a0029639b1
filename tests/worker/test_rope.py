"""Frequencies and magnitudes of rotary embeddings are those of transformers, as models use them."""

import json

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from noria.models.hf_config import read_hf_config
from worker.models.layers import rotation
from worker.models.rope import frequencies

QWEN = {"rope_theta": 1_000_000.0, "original_max_position_embeddings": 32768, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
# As published: Qwen2.5 and Qwen3 for 131,072 tokens, Llama 3.1; then every field of YaRN.
CASES = {
    "qwen2.5": ("Qwen2ForCausalLM", Qwen2Config, {"rope_type": "yarn", **QWEN}),
    "qwen3": ("Qwen3ForCausalLM", Qwen3Config, {"rope_type": "yarn", **QWEN}),
    "llama 3.1": ("LlamaForCausalLM", LlamaConfig, LLAMA3),
    "linear": (
        "LlamaForCausalLM",
        LlamaConfig,
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
    ),
    "yarn, its bounds": (
        "Qwen3ForCausalLM",
        Qwen3Config,
        {"rope_type": "yarn", **QWEN, "beta_fast": 20, "beta_slow": 2.1},
    ),
    "yarn, its magnitude": (
        "Qwen3ForCausalLM",
        Qwen3Config,
        {"rope_type": "yarn", **QWEN, "attention_factor": 0.8},
    ),
    "yarn, its scales": (
        "Qwen3ForCausalLM",
        Qwen3Config,
        {"rope_type": "yarn", **QWEN, "mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    "yarn, shorter": (
        "Qwen3ForCausalLM",
        Qwen3Config,
        {"rope_type": "yarn", **QWEN, "factor": 0.5},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_those_of_transformers(case, tmp_path):
    architecture, kind, rope = CASES[case]
    config = kind(
        vocab_size=9, hidden_size=512, num_attention_heads=4, num_key_value_heads=4,
        num_hidden_layers=1, intermediate_size=8, eos_token_id=2, rope_parameters=rope,
        max_position_embeddings=40960, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": [architecture]}))
    expected, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    ours = read_hf_config(tmp_path)
    told = frequencies(ours.rope, ours.head_dim)
    assert torch.allclose(told, expected, rtol=1e-6, atol=0)
    assert ours.rope.magnitude == pytest.approx(magnitude)
    turned = rotation(torch.tensor([0]), told, ours.rope.magnitude)
    assert turned.cos.flatten().tolist() == pytest.approx([magnitude] * len(expected))


def test_what_is_published_is_served_in_its_full_length(tmp_path):
    """Qwen's own advice adds the scaling alone: max_position_embeddings stays as it was."""
    values = {
        "architectures": ["Qwen2ForCausalLM"], "vocab_size": 9, "hidden_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1,
        "intermediate_size": 8, "eos_token_id": 2, "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32768,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_hf_config(tmp_path).max_position_embeddings == 131_072
