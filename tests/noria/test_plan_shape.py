"""A model's sizes are read from its description as `transformers` and the worker know them."""

import json

import pytest
import torch
import transformers

from noria.models.config import ConfigError
from noria.models.description import describe
from noria.plan.kv import kv_bytes_per_token
from noria.plan.shape import read_shape

_SMALL = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 7,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def _big(**sizes):
    return {**_SMALL, **sizes}


_LLAMA3_8B = _big(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
)  # fmt: skip
_QWEN25_7B = _big(
    vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=32768,
)  # fmt: skip
_QWEN3_4B = _big(
    vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip
_GEMMA3_270M = _big(
    vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
    num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512,
    max_position_embeddings=32768,
)  # fmt: skip
_OPT = {
    "vocab_size": 97, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "max_position_embeddings": 64, "word_embed_proj_dim": 48,
}  # fmt: skip
_OPT_13B = {
    "vocab_size": 50272, "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40,
    "num_attention_heads": 40, "max_position_embeddings": 2048, "word_embed_proj_dim": 5120,
    "dtype": "float16",
}  # fmt: skip
_OPT_350M = {
    "vocab_size": 50272, "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "max_position_embeddings": 2048, "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
}  # fmt: skip
_GPT2 = {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64,
         "eos_token_id": 2}  # fmt: skip

CASES = {
    "llama": (transformers.LlamaConfig, _SMALL),
    "llama, tied": (transformers.LlamaConfig, _big(tie_word_embeddings=True)),
    "llama, biases": (transformers.LlamaConfig, _big(attention_bias=True, mlp_bias=True)),
    "llama, head size": (transformers.LlamaConfig, _big(head_dim=16)),
    "llama 3 8B": (transformers.LlamaConfig, _LLAMA3_8B),
    "mistral": (transformers.MistralConfig, _SMALL),
    "mistral, no window": (transformers.MistralConfig, _big(sliding_window=None)),
    "qwen2": (transformers.Qwen2Config, _SMALL),
    "qwen2, windows": (
        transformers.Qwen2Config,
        _big(use_sliding_window=True, sliding_window=8, max_window_layers=2),
    ),
    "qwen2.5 7B": (transformers.Qwen2Config, _QWEN25_7B),
    "qwen3": (transformers.Qwen3Config, _big(head_dim=16)),
    "qwen3, biases": (transformers.Qwen3Config, _big(head_dim=16, attention_bias=True)),
    "qwen3 4B": (transformers.Qwen3Config, _QWEN3_4B),
    "gemma3": (transformers.Gemma3TextConfig, _big(head_dim=16, sliding_window=8)),
    "gemma3, biases": (transformers.Gemma3TextConfig, _big(head_dim=16, attention_bias=True)),
    "gemma3, untied": (transformers.Gemma3TextConfig, _big(tie_word_embeddings=False)),
    "gemma3 270M": (transformers.Gemma3TextConfig, _GEMMA3_270M),
    "gpt2": (transformers.GPT2Config, _GPT2),
    "gpt2, inner size": (transformers.GPT2Config, {**_GPT2, "n_inner": 77}),
    "gpt2 124M": (transformers.GPT2Config, {}),
    "opt": (transformers.OPTConfig, _OPT),
    "opt, no biases": (transformers.OPTConfig, {**_OPT, "enable_bias": False}),
    "opt, plain norms": (transformers.OPTConfig, {**_OPT, "layer_norm_elementwise_affine": False}),
    "opt, no last norm": (transformers.OPTConfig, {**_OPT, "_remove_final_layer_norm": True}),
    "opt 350M": (transformers.OPTConfig, _OPT_350M),
    "opt 13B": (transformers.OPTConfig, _OPT_13B),
}


def _written(case, folder):
    """The config as `transformers` writes it, and the model without its weights."""
    kind, values = CASES[case]
    config = kind(**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    return config, model


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_transformers(case, tmp_path):
    config, model = _written(case, tmp_path)
    shape = read_shape(tmp_path)
    assert shape.num_parameters == model.num_parameters()
    assert shape.vocab_size == config.vocab_size
    assert shape.max_position_embeddings == config.max_position_embeddings


@pytest.mark.parametrize(
    ("case", "window", "layers"),
    [
        ("mistral", 4096, 7),
        ("mistral, no window", None, 0),
        ("qwen2", None, 0),
        ("qwen2, windows", 8, 5),
        ("gemma3", 8, 6),
        ("gemma3 270M", 512, 15),
    ],
)
def test_layers_with_a_window_are_counted(case, window, layers, tmp_path):
    _written(case, tmp_path)
    shape = read_shape(tmp_path)
    assert (shape.window, shape.num_windowed_layers) == (window, layers)
    # Files older than `layer_types` say the same by their other fields.
    values = json.loads((tmp_path / "config.json").read_text())
    values.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_shape(tmp_path) == shape


@pytest.mark.parametrize(
    ("case", "itemsize", "expected"),
    [("opt 13B", 2, 819_200), ("qwen2.5 7B", 2, 57_344), ("llama 3 8B", 2, 131_072)],
)
def test_known_models_keep_the_known_bytes_a_token(case, itemsize, expected, tmp_path):
    _written(case, tmp_path)
    shape = read_shape(tmp_path)
    per_token = kv_bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, itemsize)
    assert per_token == expected


def test_a_config_file_alone_is_enough(tmp_path):
    _written("opt 13B", tmp_path)
    only = tmp_path / "config.json"
    assert read_shape(only) == read_shape(tmp_path)
    assert describe(only).dtype == "float16"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size is '48'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": 10**30}, "vocab_size is 1000"),
        ({"num_key_value_heads": 4}, "num_heads 6 is no multiple of num_kv_heads 4"),
        ({"num_attention_heads": 5, "num_key_value_heads": 1}, "head_dim is 9"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    ],
)
def test_a_wrong_config_is_refused_by_its_field(change, named, tmp_path):
    values = {"architectures": ["LlamaForCausalLM"], **_SMALL, **change}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=named):
        read_shape(tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "OPTForCausalLM"]
)
def test_no_number_of_layers_takes_time(architecture, tmp_path):
    """What a config of some hundred bytes says must not keep a planner busy."""
    values = {"architectures": [architecture], **_SMALL, "num_hidden_layers": 1 << 40}
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = read_shape(tmp_path)
    assert shape.num_layers == 1 << 40
    assert shape.num_parameters > 1 << 50


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\udcff"])
def test_what_is_no_json_object_is_refused_by_its_file(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(tmp_path)


@pytest.mark.model
def test_a_gguf_header_gives_the_same_sizes_as_the_loaded_model(demo_model_path):
    shape = read_shape(demo_model_path)
    assert shape.num_parameters == 134_515_008
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (30, 3, 64)
    assert shape.max_position_embeddings == 8192
