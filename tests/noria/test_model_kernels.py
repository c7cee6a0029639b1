"""What the CPU's own kernels cannot compute is named, one reason for each field."""

from dataclasses import replace

import pytest

from noria.models.description import describe
from noria.models.kernels import reasons_against
from noria.models.rope import Rope
from tests.support.tiny_families import tiny_family


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_family("llama").save_pretrained(folder)
    return describe(folder).config


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "gemma3"}, "architecture gemma3 is none of llama, mistral"),
        ({"attention_out_bias": True}, "the model has attention_out_bias"),
        ({"mlp_bias": True}, "the model has mlp_bias"),
        ({"local_rope": Rope(), "sliding_window": 8}, "the model has local_rope"),
        ({"final_logit_softcap": 3.0}, "the model has final_logit_softcap"),
        ({"hidden_size": 80}, "hidden_size 80 is no multiple of 32"),
        ({"intermediate_size": 100}, "intermediate_size 100 is no multiple of 32"),
        ({"head_dim": 48}, "head_dim 48 is no multiple of 32"),
        ({"head_dim": 544}, "head_dim 544 is above 512"),
        ({"num_heads": 65, "num_kv_heads": 1}, "65 query heads per KV head are above 64"),
    ],
)
def test_each_limit_is_told_alone(llama, changes, reason):
    assert reasons_against(llama) == []
    told = reasons_against(replace(llama, **changes))
    assert len(told) == 1
    assert reason in told[0]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "float32"}, "dtype float32 was asked for, its weights are bfloat16"),
        ({"block_size": 24}, "block_size 24 is no multiple of 16"),
    ],
)
def test_settings_count_too(llama, settings, reason):
    assert reasons_against(llama, **settings) == [reason]
    assert reasons_against(llama, dtype="bfloat16", block_size=32) == []


def test_what_transformers_computes_is_not_computed_by_them(tmp_path):
    tiny_family("opt").save_pretrained(tmp_path)
    assert "transformers' own code" in reasons_against(describe(tmp_path).config)[0]
