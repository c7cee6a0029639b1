"""Every family gives transformers' logits, however positions are cut up and batched.

Within 1e-3 absolute and 1e-4 on average, in fp32.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny_families import FAMILIES, VOCAB, tiny_family
from tests.support.tiny_models import Forward, edit_config, scheduled, write_gguf
from worker.models.loader import open_checkpoint

PROMPT = [(index * 37 + 11) % VOCAB for index in range(41)]
OTHER = [(index * 53 + 7) % VOCAB for index in range(30)]
BLOCKS = [7, 3, 12, 1, 30, 22, 9, 15, 2, 18, 40, 5]
OTHER_BLOCKS = [50, 44, 51, 45, 52, 46, 53, 47]
# llama.cpp's name of each family's files, and what its metadata say beside the sizes.
GGUF = {
    "llama": ("llama", {}),
    "llama, linear rope": (
        "llama",
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
    ),
    "llama, yarn rope": (
        "llama",
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 64,
        },
    ),
    "llama, biases": ("llama", {}),
    "mistral": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {"attention__sliding_window": 7}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """transformers' model, and ours from the files that it wrote."""
    folder = tmp_path_factory.mktemp("tiny")
    theirs = tiny_family(request.param)
    theirs.save_pretrained(folder)
    return theirs, open_checkpoint(folder).load()


def expected(theirs, token_ids):
    """fp32 logits [T, vocab] of every position."""
    with torch.inference_mode():
        return theirs(torch.tensor([token_ids])).logits[0]


def assert_close(ours, theirs):
    assert ours.dtype is torch.float32
    difference = (ours - theirs).abs()
    assert difference.max() < 1e-3
    assert difference.mean() < 1e-4
    assert theirs.std() > 0.1


def chunks(model, size):
    """Logits of the prompt computed `size` positions at a time."""
    forward = Forward(model)
    parts = [
        forward.logits(scheduled(0, PROMPT[at : at + size], at, BLOCKS))
        for at in range(0, len(PROMPT), size)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("size", [41, 16, 5, 1], ids=["prompt", "chunks", "small", "decode"])
def test_logits_are_those_of_transformers(pair, size):
    theirs, ours = pair
    assert_close(chunks(ours, size), expected(theirs, PROMPT))


def test_decodes_and_chunks_share_a_step(pair):
    theirs, ours = pair
    forward = Forward(ours)
    forward.logits(scheduled(0, PROMPT[:40], 0, BLOCKS), scheduled(1, OTHER[:13], 0, OTHER_BLOCKS))
    together = forward.logits(
        scheduled(0, PROMPT[40:], 40, BLOCKS), scheduled(1, OTHER[13:], 13, OTHER_BLOCKS)
    )
    alone = expected(theirs, PROMPT)[40:], expected(theirs, OTHER)[13:]
    assert_close(together, torch.cat(alone))


# Fields of configs from before transformers 5, which replace those it writes now.
OLD = {
    "llama, linear rope": {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen3, yarn rope": {
        "rope_theta": 300.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "gemma3": {
        "rope_theta": 900.0,
        "rope_local_base_freq": 70.0,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        "sliding_window_pattern": 2,
        "layer_types": None,
        "hidden_act": "gelu_pytorch_tanh",
        "cache_implementation": "hybrid",
    },
    "mistral, window": {"rope_theta": 300.0, "sliding_window": 12},
    "qwen2, windows": {"rope_theta": 300.0, "layer_types": None, "max_window_layers": 2},
}


@pytest.mark.parametrize("case", OLD)
def test_configs_of_older_versions_are_read_as_transformers_reads_them(case, tmp_path):
    tiny_family(case).save_pretrained(tmp_path)
    edit_config(tmp_path, rope_parameters=None, **OLD[case])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours = open_checkpoint(tmp_path).load()
    assert_close(chunks(ours, 16), expected(theirs, PROMPT))


@pytest.mark.parametrize("case", GGUF)
def test_gguf_files_give_the_same_logits(case, tmp_path):
    """Names of the gguf package, llama.cpp's order of rows and its norms with one added."""
    theirs, (architecture, metadata) = tiny_family(case), GGUF[case]
    write_gguf(tmp_path / "m.gguf", theirs, architecture=architecture, **metadata)
    ours = open_checkpoint(tmp_path / "m.gguf").load()
    assert_close(chunks(ours, 16), expected(theirs, PROMPT))


def test_biases_of_a_gguf_file_are_those_that_it_holds(tmp_path):
    """Qwen3's config has a switch for them, its GGUF metadata have none."""
    theirs = tiny_family("qwen3", attention_bias=True)
    write_gguf(tmp_path / "m.gguf", theirs, architecture="qwen3")
    ours = open_checkpoint(tmp_path / "m.gguf").load()
    assert_close(chunks(ours, 16), expected(theirs, PROMPT))


def test_gguf_files_list_the_factors_of_llama3(tmp_path):
    """llama.cpp's converter writes what each frequency is divided by as a tensor."""
    theirs = tiny_family("llama, llama3 rope")
    plain = 1.0 / 500.0 ** (torch.arange(0, 32, 2) / 32)
    factors = plain / theirs.model.rotary_emb.inv_freq
    assert factors.max() > 7.9
    assert factors.min() < 1.1
    write_gguf(tmp_path / "m.gguf", theirs, extra={"rope_freqs.weight": factors.numpy()})
    ours = open_checkpoint(tmp_path / "m.gguf").load()
    assert_close(chunks(ours, 16), expected(theirs, PROMPT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_as_near_as_those_of_transformers(pair, dtype, tmp_path):
    """Our error against fp32 is at most half again that of transformers in the same dtype."""
    theirs, _ = pair
    theirs.save_pretrained(tmp_path)
    exact = expected(theirs, PROMPT)
    narrow = type(theirs).from_pretrained(tmp_path, dtype=dtype).eval()
    ours = chunks(open_checkpoint(tmp_path).load(dtype), 16)
    error = (expected(narrow, PROMPT).float() - exact).abs().mean()
    assert 0 < (ours - exact).abs().mean() < 1.5 * error
