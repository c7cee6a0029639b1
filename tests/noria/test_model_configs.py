"""What a model asks for and is not honoured is refused by name and value."""

import dataclasses
import json

import pytest

from noria.models.config import ConfigError
from noria.models.gguf_config import read_gguf_config
from noria.models.hf_config import read_hf_config
from noria.models.registry import family_of
from noria.models.rope import Rope
from noria.service.gguf_file import read_gguf
from tests.support.tiny_families import tiny_family
from tests.support.tiny_models import HEAD_DIM, edit_config, tiny_llama, write_gguf

MINIMAL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 256, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Writes a minimal config with changes and gives its folder."""

    def write(**changes):
        values = {k: v for k, v in (MINIMAL | changes).items() if v != "absent"}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path

    return write


def test_defaults_are_those_of_the_format(folder):
    config = read_hf_config(folder())
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 16, 10000.0)
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-6, False)
    assert config.eos_token_ids == {2}


def test_a_config_written_by_transformers_is_read(tmp_path):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    config = read_hf_config(tmp_path)
    assert (config.rope.theta, config.head_dim, config.num_kv_heads) == (5000.0, HEAD_DIM, 2)
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sliding_window", 4096),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "awq"}),
        ("pretraining_tp", 2),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("num_local_experts", 8),
        ("some_new_field", "some_value"),
        ("_some_private_field", 3),
        ("_sliding_window_pattern", 4),
    ],
)
def test_what_is_not_honoured_is_refused(folder, field, value):
    with pytest.raises(ConfigError) as error:
        read_hf_config(folder(**{field: value}))
    assert f"{field} = {value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sliding_window", None),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("rope_scaling", None),
        ("torch_dtype", "bfloat16"),
        ("_name_or_path", "x"),
    ],
)
def test_what_changes_nothing_is_accepted(folder, field, value):
    assert read_hf_config(folder(**{field: value})) == read_hf_config(folder())


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (YARN | {"original_max_position_embeddings": 200}, 800),
        (YARN | {"original_max_position_embeddings": 32}, 256),
        (YARN, 1024),
        ({"rope_type": "linear", "factor": 4.0}, 256),
    ],
)
def test_yarn_stretches_the_positions_that_can_be_asked_for(folder, rope, longest):
    """To `factor` times the original ones, where the config does not count them already."""
    assert read_hf_config(folder(rope_scaling=rope)).max_position_embeddings == longest


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({"sliding_window_pattern": 2, "_sliding_window_pattern": 6}, [1, 3, 5]),
        ({"_sliding_window_pattern": 6}, [5]),
        ({"_sliding_window_pattern": 4, "layer_types": ["full_attention"] * 6}, [*range(6)]),
    ],
)
def test_a_noted_pattern_is_read_as_transformers_reads_it(folder, changes, full):
    config = read_hf_config(folder(**GEMMA3, num_hidden_layers=6, **changes))
    assert [layer for layer in range(6) if config.window_of(layer) is None] == full


def test_a_noted_pattern_that_says_something_else_is_refused(folder):
    with pytest.raises(ConfigError, match="_sliding_window_pattern = 4 without layer_types"):
        read_hf_config(folder(**GEMMA3, num_hidden_layers=6, _sliding_window_pattern=4))


def test_rope_parameters_stand_for_rope_theta_and_are_checked(folder):
    config = read_hf_config(folder(rope_parameters={"rope_type": "default", "rope_theta": 7.0}))
    assert config.rope == Rope(7.0)
    with pytest.raises(ConfigError, match=r"rope_parameters\.rope_type = 'dynamic'"):
        read_hf_config(folder(rope_parameters={"rope_type": "dynamic", "rope_theta": 7.0}))


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32.0}, "beta_fast = 32.0"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0.0"),
        ({"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is missing"),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
            },
            "low_freq_factor 4.0 is not below high_freq_factor 4.0",
        ),
        ("linear", "rope_scaling is 'linear'"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_scaling.rope_type = 'dynamic'"),
        ({"rope_type": "longrope", "factor": 2.0}, "rope_scaling.rope_type = 'longrope'"),
        ({"rope_type": "yarn"}, "factor is missing"),
        (YARN | {"truncate": False}, "rope_scaling.truncate = False"),
        (YARN | {"attention_factor": 0}, "attention_factor is 0.0"),
        (YARN | {"beta_slow": -1.0}, "beta_slow is -1.0"),
        (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        (YARN | {"rope_theta": 1.0}, "rope_theta is 1.0; yarn needs one above 1"),
    ],
)
def test_rope_scalings_that_are_not_whole_are_refused(folder, rope, words):
    with pytest.raises(ConfigError) as error:
        read_hf_config(folder(rope_scaling=rope))
    assert words in str(error.value)


def test_two_descriptions_of_rope_contradict_each_other(folder):
    rope = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ConfigError, match="both rope_parameters and rope_scaling"):
        read_hf_config(folder(rope_scaling=rope, rope_parameters={"rope_theta": 1e4} | rope))


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "num_key_value_heads": 4}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (QWEN3 | {"layer_types": ["full_attention"]}, "a list of 2 words"),
        (QWEN3 | {"layer_types": ["full_attention", "chunked"]}, "layer_types = 'chunked'"),
        (QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]}, "without a window"),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        (GEMMA3 | {"sliding_window": None}, "sliding_window is missing"),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_scalar is 0"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration"),
    ],
)
def test_windows_and_layers_that_contradict_are_named(folder, changes, words):
    with pytest.raises(ConfigError) as error:
        read_hf_config(folder(**changes))
    assert words in str(error.value)


def test_absent_fields_have_the_familys_defaults_and_null_ones_have_not(folder):
    """Of transformers' classes: Mistral's window and KV heads, Gemma's pattern."""
    mistral = {"architectures": ["MistralForCausalLM"], "num_attention_heads": 8}
    assert read_hf_config(folder(**mistral)).sliding_window == 4096
    assert read_hf_config(folder(**mistral)).num_kv_heads == 8
    assert read_hf_config(folder(**mistral, sliding_window=None)).sliding_window is None
    gemma = read_hf_config(folder(**GEMMA3, num_hidden_layers=12))
    assert [gemma.window_of(layer) for layer in (4, 5, 6, 11)] == [4096, None, 4096, None]
    assert (gemma.rope_of(4).theta, gemma.rope_of(5).theta) == (10_000.0, 1_000_000.0)
    assert (gemma.attention_scale, gemma.tie_word_embeddings) == (1 / 16, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": "absent"}, "architectures"),
        ({"vocab_size": "absent"}, "vocab_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_key_value_heads": 3}, "num_heads 4 is no multiple of num_kv_heads 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": 0}, "rms_norm_eps 0.0"),
        ({"eos_token_id": 100}, "EOS id 100"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_contradictions_are_named(folder, changes, words):
    with pytest.raises(ConfigError) as error:
        read_hf_config(folder(**changes))
    assert words in str(error.value)


def test_eos_ids_come_from_generation_config_where_it_has_them(folder):
    path = folder(eos_token_id=2)
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 9], "temperature": 0.6}')
    assert read_hf_config(path).eos_token_ids == {7, 9}
    (path / "generation_config.json").write_text("{}")
    assert read_hf_config(path).eos_token_ids == {2}


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_damaged_json_names_the_file(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_hf_config(tmp_path)


def test_gguf_metadata_gives_the_same_config(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    write_gguf(tmp_path / "m.gguf", model)
    from_gguf = read_gguf_config(read_gguf(tmp_path / "m.gguf"))
    from_folder = read_hf_config(tmp_path)
    assert from_gguf.rms_norm_eps == pytest.approx(from_folder.rms_norm_eps)
    assert {**vars_of(from_gguf), "rms_norm_eps": 0} == {**vars_of(from_folder), "rms_norm_eps": 0}


def vars_of(config):
    return dataclasses.asdict(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope__scaling__type", "longrope"),
        ("rope__scaling__attn_factor", 2.0),
        ("attention__sliding_window", 512.0),
        ("expert_count", 8.0),
        ("some__new_key", 1.0),
    ],
)
def test_gguf_fields_that_are_not_honoured_are_refused(tmp_path, field, value):
    write_gguf(tmp_path / "m.gguf", tiny_llama(), **{field: value})
    with pytest.raises(ConfigError) as error:
        read_gguf_config(read_gguf(tmp_path / "m.gguf"))
    assert f"llama.{field.replace('__', '.')} = {value!r}" in str(error.value)


def gemma_gguf(path, **metadata):
    """The config of a GGUF file of Gemma 3 whose metadata were changed."""
    if not path.exists():
        write_gguf(path, tiny_family("gemma3"), architecture="gemma3")
    file = read_gguf(path)
    changed = {f"gemma3.{name.replace('__', '.')}": value for name, value in metadata.items()}
    file.metadata.update(changed)
    return read_gguf_config(file)


def test_gguf_metadata_of_gemma3_are_honoured(tmp_path):
    """llama.cpp's defaults: one layer of six sees everything, the others turn by 10,000."""
    path = tmp_path / "m.gguf"
    plain = gemma_gguf(path, attention__sliding_window=7)
    assert [plain.window_of(layer) for layer in range(7)] == [7, 7, 7, 7, 7, None, 7]
    assert (plain.local_rope.theta, plain.final_logit_softcap) == (10_000.0, None)
    other = gemma_gguf(
        path,
        attention__sliding_window=9,
        attention__sliding_window_pattern=2,
        rope__freq_base_swa=77.0,
        final_logit_softcapping=3.5,
    )
    assert [other.window_of(layer) for layer in range(7)] == [9, None, 9, None, 9, None, 9]
    assert (other.local_rope.theta, other.final_logit_softcap) == (77.0, 3.5)


def test_gemma3_27b_scales_attention_by_its_hidden_size_per_head(tmp_path):
    """Of 62 layers; GGUF files do not say it, llama.cpp knows it."""
    path = tmp_path / "m.gguf"
    assert gemma_gguf(path).attention_scale == pytest.approx(32**-0.5)
    assert gemma_gguf(path, block_count=62).attention_scale == pytest.approx((64 / 4) ** -0.5)


def test_every_token_that_ends_a_turn_is_read_from_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    gemma_gguf(path)
    file = read_gguf(path)
    file.metadata["tokenizer.ggml.eot_token_id"] = 106
    file.metadata["tokenizer.ggml.eom_token_id"] = 107
    assert read_gguf_config(file).eos_token_ids == {2, 106, 107}


@pytest.mark.parametrize("name", ["rope.dimension_count", "attention.value_length"])
def test_heads_of_two_sizes_are_refused(tmp_path, name):
    write_gguf(tmp_path / "m.gguf", tiny_llama())
    file = read_gguf(tmp_path / "m.gguf")
    file.metadata[f"llama.{name}"] = 16
    with pytest.raises(ConfigError, match=rf"{name} = 16 differs from the head size 32"):
        read_gguf_config(file)


def test_other_gguf_architectures_are_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", tiny_llama())
    file = read_gguf(tmp_path / "m.gguf")
    file.metadata["general.architecture"] = "mamba"
    with pytest.raises(ConfigError, match="mamba"):
        read_gguf_config(file)


def test_an_unknown_family_is_refused_with_those_known():
    with pytest.raises(ConfigError, match=r"'mamba'.*llama"):
        family_of("mamba")


def test_edited_configs_are_refused_as_a_whole(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    edit_config(tmp_path, num_local_experts=8)
    with pytest.raises(ConfigError, match="num_local_experts = 8"):
        read_hf_config(tmp_path)
