"""What `noria plan` says of a model is what a worker that is started with it really takes.

Weights, dtype, bytes of keys and values, and positions: of every family, and of both real models.
"""

import json

import pytest
import torch
import transformers
from click.testing import CliRunner

from noria.cli.main import main
from noria.models.config import ConfigError
from noria.models.description import describe
from noria.plan.memory import host_memory
from noria.plan.shape import shape_of
from tests.support.native import kernels
from tests.support.tiny_families import FAMILIES, FOREIGN, tiny_family
from tests.support.tiny_models import write_gguf
from worker.config import WorkerConfig
from worker.models.decoder import Decoder
from worker.models.safetensors_weights import SafetensorsWeights
from worker.native.model import NativeDecoder
from worker.network import load_network

BLOCKS = 5
NATIVE = {"num_attention_heads": 2, "num_key_value_heads": 1}


def planned(path, *options):
    result = CliRunner().invoke(main, ["plan", "--model", str(path), "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def started(path, **settings):
    """The network of a worker with its cache taken."""
    config = WorkerConfig(path, max_num_seqs=2, cpu_threads=1, **settings)
    network = load_network(config, host_memory(), lambda stage, done, total: None)
    network.backend.allocate(network.size.spec, BLOCKS, network.size.block_size)
    return network


def bytes_of(tensors):
    """Memory that lies under them, each piece once."""
    pieces = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(pieces.values())


def tensors_in(value, seen):
    """All that are reached from a value, but angles and vocabularies of Python."""
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, dict):
            inside = [value[key] for key in value if key != "_turns"]
        elif isinstance(value, list | tuple):
            inside = value
        else:
            inside = [vars(value)] if hasattr(value, "__dict__") else []
        for item in inside:
            yield from tensors_in(item, seen)


def weights_held(model):
    if isinstance(model, Decoder):
        return bytes_of(tensors_in(model, set()))
    if isinstance(model, NativeDecoder):
        return bytes_of([model._arena._memory, *model._kept])
    return bytes_of(model._body.parameters()) + bytes_of(
        [p for p in model._head.parameters() if all(p is not q for q in model._body.parameters())]
    )


def cache_held(backend):
    names = ("_memory",) if backend.name == "cpu_native" else ("_keys", "_values")
    return bytes_of(getattr(backend, name) for name in names)


def assert_agree(told, network):
    assert told["dtype"] == network.dtype
    assert told["weight_bytes"] == network.weight_bytes == weights_held(network.model)
    tokens = BLOCKS * network.size.block_size
    assert told["kv_bytes_per_token"] * tokens == cache_held(network.backend)
    assert told["kv_bytes_per_token"] == network.size.spec.bytes_per_token
    assert network.model.kv_spec == network.size.spec
    assert told["max_model_len"] == network.config.max_position_embeddings
    assert told["num_parameters"] > 0


@pytest.mark.parametrize("case", [*FAMILIES, *FOREIGN])
def test_of_every_family(case, tmp_path):
    """As workers choose for themselves: the CPU's kernels in bfloat16, or torch in float32."""
    kernels("auto")
    tiny_family(case).save_pretrained(tmp_path)
    assert_agree(planned(tmp_path), started(tmp_path))


@pytest.mark.parametrize("case", ["qwen2", "qwen2, windows"])
def test_of_families_whose_tiny_heads_the_kernels_know(case, tmp_path):
    kernels("auto")
    tiny_family(case, **NATIVE).save_pretrained(tmp_path)
    network = started(tmp_path)
    assert network.backend.name == "cpu_native"
    assert_agree(planned(tmp_path), network)


@pytest.mark.parametrize("case", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_of_every_dtype(case, dtype, tmp_path):
    kernels("auto")
    tiny_family(case).save_pretrained(tmp_path)
    assert_agree(planned(tmp_path, "--dtype", dtype), started(tmp_path, dtype=dtype))


def test_of_a_block_size_that_the_kernels_do_not_have(tmp_path):
    tiny_family("llama").save_pretrained(tmp_path)
    told = planned(tmp_path, "--block-size", "8")
    assert_agree(told, started(tmp_path, block_size=8))
    assert told["dtype"] == "float32"


@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3"])
def test_of_a_gguf_file(case, tmp_path):
    kernels("auto")
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_family(case), architecture=case)
    assert_agree(planned(path), started(path))


def real(path):
    told, network = planned(path), started(path)
    assert_agree(told, network)
    return told


@pytest.mark.model
def test_of_smollm2(demo_model_path):
    kernels("auto")
    told = real(demo_model_path)
    assert (told["num_parameters"], told["dtype"]) == (134_515_008, "bfloat16")
    assert told["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2


@pytest.mark.soak
@pytest.mark.model
def test_of_gemma3(gemma_model_path):
    told = real(gemma_model_path)
    assert (told["num_parameters"], told["dtype"]) == (268_098_176, "float32")
    assert told["kv_bytes_per_token"] == 2 * 18 * 1 * 256 * 4


@pytest.mark.parametrize("case", [*FAMILIES, *FOREIGN])
def test_tensors_are_those_of_the_files_that_transformers_writes(case, tmp_path):
    """By name and shape, so that planning counts what a worker reads."""
    tiny_family(case).save_pretrained(tmp_path)
    told = {part.name: part.shape for p in describe(tmp_path).layout.all() for part in p.parts}
    written = SafetensorsWeights(tmp_path).shapes()
    assert set(told) == set(written)
    if case not in FOREIGN or case.startswith("opt"):
        assert told == written
    assert {n: torch.Size(s).numel() for n, s in told.items()} == {
        n: torch.Size(s).numel() for n, s in written.items()
    }


def by_transformers(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    heads = config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or []
    return {
        "parameters": model.num_parameters(),
        "kv_heads": getattr(config, "num_key_value_heads", heads),
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "positions": config.max_position_embeddings,
        "windows": kinds.count("sliding_attention") if kinds else None,
    }


def by_us(folder):
    shape = shape_of(describe(folder))
    return {
        "parameters": shape.num_parameters,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "positions": shape.max_position_embeddings,
        "windows": shape.num_windowed_layers,
    }


def refusal_or_sizes(folder):
    """Ours, or why there are none."""
    try:
        return "", by_us(folder)
    except ConfigError as error:
        return str(error), None


# As many heads as the families' own defaults of KV heads divide.
MANY_HEADS = {"num_attention_heads": 32, "hidden_size": 128}
BY_CASE = {
    "llama": MANY_HEADS, "mistral, window": MANY_HEADS, "qwen2, windows": MANY_HEADS,
    "qwen3": MANY_HEADS, "gemma3": MANY_HEADS, "gpt2": {}, "opt": {},
}  # fmt: skip


@pytest.mark.parametrize("case", BY_CASE)
def test_an_absent_field_is_what_transformers_takes_or_is_asked_for(case, tmp_path):
    """One field of the config after the other is left out."""
    model = tiny_family(case, **BY_CASE[case])
    model.config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {"architectures": [type(model).__name__]}
    compared = set()
    for name in values.keys() - {"architectures", "model_type"}:
        path.write_text(json.dumps({k: v for k, v in values.items() if k != name}))
        try:
            theirs = by_transformers(tmp_path)
        except Exception:
            continue  # What is left makes no model.
        refusal, ours = refusal_or_sizes(tmp_path)
        if ours is None:
            # Sizes that nobody should guess, GPT-2's own EOS beyond a small vocabulary, and
            # layers with a window where no window is.
            known = (f"{name} is missing", "EOS id 50256", "without a window")
            assert any(words in refusal for words in known), refusal
            continue
        if theirs["windows"] is None:
            theirs["windows"] = ours["windows"]
        assert ours == theirs, name
        compared.add(name)
    assert len(compared) >= 8
    assert "num_key_value_heads" in compared or case in FOREIGN


def test_of_a_folder_and_of_its_config_alone_the_same_is_said(tmp_path):
    tiny_family("qwen3").save_pretrained(tmp_path)
    assert describe(tmp_path).config == describe(tmp_path / "config.json").config
