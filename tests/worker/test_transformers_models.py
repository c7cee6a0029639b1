"""Models that only transformers knows run on its code with our attention, or are refused.

Logits within 1e-3 absolute and 1e-4 on average of transformers' own, in fp32.
"""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MptConfig,
    MptForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from noria.models.config import ConfigError
from tests.support.tiny_families import FOREIGN, VOCAB, tiny_family
from tests.support.tiny_models import Forward, edit_config, randomised, scheduled, step
from worker.model_runner import ModelRunner
from worker.models.loader import open_checkpoint
from worker.models.transformers_checkpoint import TransformersCheckpoint, _check_windows
from worker.models.transformers_model import AttentionCall, _checked, paged_attention
from worker.models.weights import WeightsError

PROMPT = [(index * 37 + 11) % VOCAB for index in range(41)]
OTHER = [(index * 53 + 7) % VOCAB for index in range(30)]
BLOCKS = [7, 3, 12, 1, 30, 22, 9, 15, 2, 18, 40, 5]
OTHER_BLOCKS = [50, 44, 51, 45, 52, 46, 53, 47]
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 64, "initializer_range": 0.15, "eos_token_id": 2,
    "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module", params=FOREIGN)
def pair(request, tmp_path_factory):
    """transformers' model, and ours from the files that it wrote."""
    folder = tmp_path_factory.mktemp("foreign")
    theirs = tiny_family(request.param)
    theirs.save_pretrained(folder)
    return theirs, open_checkpoint(folder).load()


def expected(theirs, token_ids):
    with torch.inference_mode():
        return theirs(torch.tensor([token_ids])).logits[0]


def assert_close(ours, theirs):
    difference = (ours - theirs).abs()
    assert difference.max() < 1e-3
    assert difference.mean() < 1e-4
    assert theirs.std() > 0.1


@pytest.mark.parametrize("size", [41, 16, 1], ids=["prompt", "chunks", "decode"])
def test_logits_are_those_of_transformers(pair, size):
    theirs, ours = pair
    forward = Forward(ours)
    parts = [
        forward.logits(scheduled(0, PROMPT[at : at + size], at, BLOCKS))
        for at in range(0, len(PROMPT), size)
    ]
    assert_close(torch.cat(parts), expected(theirs, PROMPT))


def test_decodes_and_chunks_share_a_step(pair):
    theirs, ours = pair
    forward = Forward(ours)
    forward.logits(scheduled(0, PROMPT[:40], 0, BLOCKS), scheduled(1, OTHER[:13], 0, OTHER_BLOCKS))
    together = forward.logits(
        scheduled(0, PROMPT[40:], 40, BLOCKS), scheduled(1, OTHER[13:], 13, OTHER_BLOCKS)
    )
    alone = expected(theirs, PROMPT)[40:], expected(theirs, OTHER)[13:]
    assert_close(together, torch.cat(alone))


def test_the_runner_samples_from_it(pair):
    theirs, ours = pair
    forward = Forward(ours)
    runner = ModelRunner(ours, forward.backend, forward.block_size)
    runner.warm_up()
    result = runner.execute(step(scheduled(1, PROMPT, 0, BLOCKS)))
    assert result.tokens[1].token_id == int(expected(theirs, PROMPT)[-1].argmax())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_those_of_the_cache(dtype, tmp_path):
    theirs = tiny_family("opt")
    theirs.save_pretrained(tmp_path)
    ours = open_checkpoint(tmp_path).load(dtype)
    assert ours.kv_spec.dtype is dtype
    logits = Forward(ours).logits(scheduled(0, PROMPT, 0, BLOCKS))
    exact = expected(theirs, PROMPT)
    assert (logits - exact).abs().mean() < 0.05 * exact.std()


def saved(kind, config, folder):
    randomised(kind, config).save_pretrained(folder)
    return folder


def test_a_window_told_to_attention_is_honoured(tmp_path):
    config = Phi3Config(**SIZES, intermediate_size=64, num_key_value_heads=3, sliding_window=9)
    theirs = randomised(Phi3ForCausalLM, config)
    theirs.save_pretrained(tmp_path)
    ours = open_checkpoint(tmp_path).load()
    assert [call.window for call in ours.calls] == [9, 9]
    assert_close(Forward(ours).logits(scheduled(0, PROMPT, 0, BLOCKS)), expected(theirs, PROMPT))


def refusal(folder):
    with pytest.raises((ConfigError, WeightsError)) as error:
        open_checkpoint(folder).load()
    return str(error.value)


def test_soft_caps_are_refused_by_name(tmp_path):
    config = Gemma2Config(**SIZES, intermediate_size=64, num_key_value_heads=3, head_dim=16)
    assert "attn_logit_softcapping = 50.0" in refusal(saved(Gemma2ForCausalLM, config, tmp_path))


def test_a_soft_cap_that_hides_is_found_where_attention_is_asked_for_it(tmp_path):
    """As if its config called it something else."""
    config = Gemma2Config(**SIZES, intermediate_size=64, num_key_value_heads=3, head_dim=16)
    saved(Gemma2ForCausalLM, config, tmp_path)
    edit_config(tmp_path, attn_logit_softcapping=None)
    assert "softcap = 50.0" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        (FalconForCausalLM, FalconConfig(**SIZES, alibi=True), "alibi = True"),
        (BloomForCausalLM, BloomConfig(**SIZES), "['BloomForCausalLM'] has ALiBi"),
        (
            MptForCausalLM,
            MptConfig(vocab_size=VOCAB, d_model=48, n_layers=1, n_heads=3, eos_token_id=2),
            "['MptForCausalLM'] has ALiBi",
        ),
        (
            T5ForConditionalGeneration,
            T5Config(d_model=16, d_kv=8, num_layers=1),
            "is_encoder_decoder = True",
        ),
        (
            MambaForCausalLM,
            MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, eos_token_id=2),
            "linear_attention",
        ),
    ],
    ids=["alibi", "alibi of its own", "alibi by default", "encoder-decoder", "no attention"],
)
def test_what_is_no_paged_causal_attention_is_refused(kind, config, words, tmp_path):
    assert words in refusal(saved(kind, config, tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("add_cross_attention", True),
        ("is_encoder_decoder", True),
        ("quantization_config", {"quant_method": "gptq"}),
        ("vision_config", {"hidden_size": 8}),
        ("attention_chunk_size", 8192),
        ("use_bidirectional_attention", True),
        ("use_alibi", True),
        ("is_causal", False),
        ("num_kv_shared_layers", 2),
        ("attn_logit_softcapping", 50.0),
        ("text_config", {"hidden_size": 8}),
        ("audio_config", {"hidden_size": 8}),
    ],
)
def test_what_our_side_would_have_to_honour_is_refused_by_name(field, value, tmp_path):
    tiny_family("gpt2").save_pretrained(tmp_path)
    edit_config(tmp_path, **{field: value})
    assert f"{field} = {value!r} is not supported" in refusal(tmp_path)


ROPES = {
    "dynamic": (OlmoForCausalLM, OlmoConfig, {"factor": 2.0}),
    "longrope": (
        Phi3ForCausalLM,
        Phi3Config,
        {
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 32,
        },
    ),
}


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_that_change_with_the_batch_are_refused(rope, tmp_path):
    kind, config, settings = ROPES[rope]
    saved(kind, config(**SIZES, intermediate_size=64, num_key_value_heads=3), tmp_path)
    parameters = {"rope_type": rope, "rope_theta": 10000.0, **settings}
    edit_config(tmp_path, rope_parameters=parameters)
    assert f"rope_type = '{rope}'" in refusal(tmp_path)


def test_a_window_that_attention_is_not_told_is_refused():
    """It would be in the mask alone, which we never see."""
    described = SimpleNamespace(sliding_window=9)
    _check_windows(described, [9, 9])
    with pytest.raises(ConfigError, match=r"sliding_window = 9 does not reach .* layer 1"):
        _check_windows(described, [9, None])
    mixed = SimpleNamespace(sliding_window=9, layer_types=["full_attention", "sliding_attention"])
    _check_windows(mixed, [None, 9])
    with pytest.raises(ConfigError, match="layer 1"):
        _check_windows(mixed, [9, None])
    _check_windows(SimpleNamespace(sliding_window=9, use_sliding_window=False), [None])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "attention_mask = a tensor"),
        ({"is_causal": False}, "is_causal = False"),
        ({"some_new_argument": 3}, "some_new_argument = 3"),
        ({"value": torch.ones(1, 2, 2, 8)}, r"value heads = \(2, 2, 8\)"),
    ],
)
def test_what_a_layer_asks_of_attention_beside_scale_and_window_is_refused(arguments, words):
    module, heads = torch.nn.Module(), torch.ones(1, 2, 2, 4)
    given = {"attention_mask": None, "position_ids": torch.zeros(1, 2), "value": heads} | arguments
    with pytest.raises(ConfigError, match=f"Module asks of attention: {words}"):
        paged_attention(module, heads, heads, **given)


def call(layer, **changes):
    """What a layer of two KV heads of 16 asks for."""
    return replace(AttentionCall(layer, 4, 2, 16, torch.float32, 0.25, None), **changes)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([], "does not use the interface"),
        ([call(0), call(0)], r"attend in the order \[0, 0\], not once each"),
        ([call(1), call(0)], r"attend in the order \[1, 0\]"),
        ([call(0), call(1, num_kv_heads=4)], "K and V of different shapes"),
        ([call(0), call(1, head_dim=32)], "K and V of different shapes"),
    ],
)
def test_layers_that_share_or_differ_in_keys_and_values_are_refused(calls, words):
    assert _checked([call(0), call(1, window=9)])
    with pytest.raises(ConfigError, match=words):
        _checked(calls)


def test_a_model_that_does_more_than_attention_is_found_by_its_logits(tmp_path, monkeypatch):
    """Here: a model that lets every position see the sum of those before it."""
    tiny_family("gpt2").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, TransformersCheckpoint)
    forward = torch.nn.LayerNorm.forward
    monkeypatch.setattr(
        torch.nn.LayerNorm, "forward", lambda self, x: forward(self, x).cumsum(dim=-2)
    )
    with pytest.raises(ConfigError, match="single positions its logits differ"):
        checkpoint.load()


def test_without_transformers_the_extra_is_named(tmp_path, monkeypatch):
    tiny_family("gpt2").save_pretrained(tmp_path)
    real = importlib.import_module

    def absent(name, *rest):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr("worker.models.transformers_checkpoint.import_module", absent)
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel.*noria\[transformers\]"):
        open_checkpoint(tmp_path)


def rewrite(folder, change):
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("transformer.h.1.mlp.c_fc.weight"), "missing: .*h.1.mlp.c_fc.weight"),
        (lambda s: s.update(odd=torch.ones(2)), "surplus: odd"),
        (
            lambda s: s.update({"transformer.h.1.mlp.c_fc.weight": torch.ones(3, 4)}),
            r"shape: .*h.1.mlp.c_fc.weight.*3, 4",
        ),
        (lambda s: s["transformer.h.0.ln_1.bias"].fill_(torch.nan), "NaN .* h.0.ln_1.bias"),
    ],
    ids=["missing", "surplus", "shape", "NaN"],
)
def test_weights_that_do_not_fit_are_named(change, words, tmp_path):
    """transformers itself would fill in random numbers and warn."""
    tiny_family("gpt2").save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(WeightsError, match=words.replace(" h.", r" .*h\.")):
        open_checkpoint(tmp_path).load()


@pytest.mark.parametrize("mask", [torch.bool, torch.uint8, torch.float32])
def test_masks_that_old_files_hold_are_passed_over(mask, tmp_path):
    """GPT-2's in `attn.bias` and `attn.masked_bias`; transformers makes its own."""
    theirs = tiny_family("gpt2")
    theirs.save_pretrained(tmp_path)
    before = open_checkpoint(tmp_path).weight_bytes(torch.float32)
    masks = {
        f"transformer.h.{layer}.attn.{name}": values.to(mask)
        for layer in range(3)
        for name, values in (("bias", torch.ones(1, 1, 64, 64)), ("masked_bias", torch.ones(())))
    }
    rewrite(tmp_path, lambda state: state.update(masks))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.weight_bytes(torch.float32) == before
    logits = Forward(checkpoint.load()).logits(scheduled(0, PROMPT, 0, BLOCKS))
    assert_close(logits, expected(theirs, PROMPT))


def test_a_surplus_bias_that_is_no_mask_is_refused(tmp_path):
    tiny_family("gpt2").save_pretrained(tmp_path)
    surplus = {"transformer.h.0.mlp.attn_proj.bias": torch.ones(48)}
    rewrite(tmp_path, lambda state: state.update(surplus))
    with pytest.raises(WeightsError, match=r"surplus: transformer\.h\.0\.mlp\.attn_proj\.bias"):
        open_checkpoint(tmp_path).load()


def test_an_architecture_nobody_knows_is_refused(tmp_path):
    """Code that a checkpoint brings along is never run."""
    tiny_family("gpt2").save_pretrained(tmp_path)
    edit_config(
        tmp_path, architectures=["OwnForCausalLM"], auto_map={"AutoModelForCausalLM": "own.Own"}
    )
    with pytest.raises(ConfigError, match=r"OwnForCausalLM.*no causal language model"):
        open_checkpoint(tmp_path)
