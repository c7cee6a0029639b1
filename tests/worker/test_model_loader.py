"""Every form of a checkpoint gives the same tensors; a wrong one is refused before it is read."""

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import LAYERS, tiny_llama, write_gguf
from worker.models.loader import open_checkpoint
from worker.models.weights import WeightsError, expected_shapes, load_parameters

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def network():
    return tiny_llama()


@pytest.fixture
def folder(tmp_path, network):
    network.save_pretrained(tmp_path)
    return tmp_path


def tensors(path, dtype=torch.float32):
    checkpoint = open_checkpoint(path)
    parameters = checkpoint.family.parameters(checkpoint.config)
    return load_parameters(parameters, checkpoint.source, dtype, lambda done, total: None)


def assert_equal(ours, theirs):
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_fused_parameters_are_their_parts_in_order(folder, network):
    loaded, state = tensors(folder), network.state_dict()
    attention = [state[f"model.layers.2.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(loaded["2.qkv"], torch.cat(attention))
    mlp = [state[f"model.layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(loaded["0.gate_up"], torch.cat(mlp))
    assert torch.equal(loaded["head"], state["lm_head.weight"])


def test_shards_equal_the_single_file(folder, network, tmp_path):
    sharded = tmp_path / "sharded"
    network.save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_equal(tensors(sharded), tensors(folder))


def test_gguf_equals_the_folder_it_was_made_from(folder, network):
    """fp32 tensors, with llama.cpp's order of query and key rows undone."""
    write_gguf(folder / "m.gguf", network)
    assert_equal(tensors(folder / "m.gguf"), tensors(folder))


def test_tied_embeddings_need_no_head(tmp_path):
    tied = tiny_llama(tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    write_gguf(tmp_path / "m.gguf", tied)
    assert "head" not in tensors(tmp_path)
    assert_equal(tensors(tmp_path / "m.gguf"), tensors(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_rounded_from_the_file(folder, dtype):
    exact, rounded = tensors(folder), tensors(folder, dtype)
    assert_equal(rounded, {name: tensor.to(dtype) for name, tensor in exact.items()})


def test_progress_reaches_the_total(folder):
    seen = []
    open_checkpoint(folder).load(progress=lambda done, total: seen.append((done, total)))
    total = 3 + 9 * LAYERS
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def rewrite(folder, change):
    """Apply `change` to the dictionary of tensors of a single-file folder."""
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)


def refusal(path):
    """The error of loading; nothing may have been read."""
    checkpoint = open_checkpoint(path)
    reads = []
    checkpoint.source.read = reads.append
    with pytest.raises(WeightsError) as error:
        checkpoint.load()
    assert not reads
    return str(error.value)


def test_a_missing_tensor_is_named(folder):
    rewrite(folder, lambda state: state.pop(NAME))
    assert f"missing: {NAME}" in refusal(folder)


def test_a_surplus_tensor_is_named(folder):
    rewrite(
        folder, lambda state: state.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(3)})
    )
    assert "surplus: model.layers.0.self_attn.q_proj.bias" in refusal(folder)


def test_a_wrong_shape_is_named_with_both(folder):
    rewrite(folder, lambda state: state.update({NAME: torch.ones(3, 4)}))
    assert f"{NAME} is (3, 4), the config asks for (160, 96)" in refusal(folder)


def test_a_long_list_of_faults_is_cut_short(folder):
    rewrite(folder, lambda state: [state.pop(k) for k in list(state) if "layers" in k])
    assert f"and {9 * LAYERS - 5} more" in refusal(folder)


def test_gguf_tensors_missing_and_surplus_are_named(tmp_path, network):
    write_gguf(
        tmp_path / "m.gguf", network, drop=("blk.0.ffn_up.weight",),
        extra={"blk.0.ffn_gate_exps.weight": np.ones(16, np.float32)},
    )  # fmt: skip
    message = refusal(tmp_path / "m.gguf")
    assert "missing: model.layers.0.mlp.up_proj.weight" in message
    assert "surplus: blk.0.ffn_gate_exps.weight" in message


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(folder, broken):
    """Every answer would be worthless; a worker does not get ready with them."""

    def damage(state):
        state[NAME][3, 4] = broken

    rewrite(folder, damage)
    with pytest.raises(WeightsError, match=rf"hold NaN or infinity in .*{NAME}.* \(as float32\)"):
        tensors(folder)


def test_weights_too_large_for_the_dtype_are_named(folder):
    rewrite(folder, lambda state: state[NAME].fill_(1e30))
    with pytest.raises(WeightsError, match=r"as float16"):
        tensors(folder, torch.float16)


@pytest.mark.parametrize("num_layers", [2**32 - 1, 10**12])
def test_more_layers_than_tensors_are_refused_at_once(folder, num_layers):
    """Before a list of their tensors fills the memory."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    with pytest.raises(ValueError, match=rf"num_layers is {num_layers}, .* has \d+ tensors"):
        open_checkpoint(folder)


def test_more_gguf_blocks_than_tensors_are_refused_at_once(tmp_path, network):
    write_gguf(tmp_path / "m.gguf", network)
    raw = bytearray((tmp_path / "m.gguf").read_bytes())
    name = b"llama.block_count"
    at = raw.index(name) + len(name) + 4
    raw[at : at + 4] = b"\xff\xff\xff\xff"
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(ValueError, match=r"num_layers is 4294967295, .* has \d+ tensors"):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_gguf_type_that_cannot_be_dequantised_is_named(tmp_path, network):
    write_gguf(tmp_path / "m.gguf", network)
    raw = bytearray((tmp_path / "m.gguf").read_bytes())
    name = b"output_norm.weight"
    at = raw.index(name) + len(name) + 4 + 8
    raw[at : at + 4] = int(GGMLQuantizationType.I32).to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is of type I32"):
        tensors(tmp_path / "m.gguf")


def test_a_truncated_gguf_names_the_tensor_and_both_sizes(tmp_path, network):
    path = tmp_path / "m.gguf"
    write_gguf(path, network)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5000])
    with pytest.raises(WeightsError, match=rf"ends at byte \d+, the file at {len(whole) - 5000}"):
        open_checkpoint(path)


def test_a_truncated_safetensors_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        WeightsError,
        match=r"model\.safetensors: damaged or truncated at \d+ bytes: model\.norm\.weight ends",
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_a_file_cut_within_its_header_is_named(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(WeightsError, match=rf"damaged or truncated at {size} bytes"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "header", ["[" * 20_000, '{"x": {"data_offsets": [0, 1e999]}}', '{"x": ' * 20_000, "1"]
)
def test_a_hostile_header_is_a_damaged_file(folder, header):
    """However deep it nests, and whatever its numbers are."""
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(
        WeightsError, match=r"model\.safetensors: damaged or truncated at \d+ bytes"
    ):
        open_checkpoint(folder)


def sharded(network, folder):
    """Two shards, and the names in the first."""
    network.save_pretrained(folder, max_shard_size="300KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(set(index.values()))
    return files, [name for name, file in index.items() if file == files[0]]


def test_shards_that_changed_places_are_refused(network, tmp_path):
    files, _ = sharded(network, tmp_path / "s")
    a, b = (tmp_path / "s" / file for file in files[:2])
    swapped = a.read_bytes(), b.read_bytes()
    b.write_bytes(swapped[0])
    a.write_bytes(swapped[1])
    with pytest.raises(WeightsError, match=r"is here, by the index it should be in model-0000"):
        open_checkpoint(tmp_path / "s")


def test_a_shard_in_the_place_of_another_is_refused(network, tmp_path):
    files, first = sharded(network, tmp_path / "s")
    (tmp_path / "s" / files[1]).write_bytes((tmp_path / "s" / files[0]).read_bytes())
    with pytest.raises(WeightsError, match=rf"({'|'.join(first)}) is in more than one file"):
        open_checkpoint(tmp_path / "s")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int32])
def test_tensors_that_are_not_of_floats_are_named(folder, dtype):
    """Quantised weights without their scales would be read as numbers."""
    rewrite(folder, lambda state: state.update({NAME: state[NAME].to(dtype)}))
    with pytest.raises(WeightsError, match=rf"{NAME} is of type"):
        open_checkpoint(folder)


def test_constants_of_the_rotary_embedding_are_passed_over(folder, network):
    rewrite(
        folder,
        lambda s: s.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}),
    )
    assert torch.equal(tensors(folder)["head"], network.state_dict()["lm_head.weight"])


def test_a_head_beside_tied_embeddings_has_to_be_their_copy(tmp_path):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path, lambda state: state.update({"lm_head.weight": embedding.clone()}))
    assert "head" not in tensors(tmp_path)
    rewrite(tmp_path, lambda state: state["lm_head.weight"].mul_(2))
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        open_checkpoint(tmp_path)


def test_an_unknown_gguf_type_is_refused(tmp_path, network):
    write_gguf(tmp_path / "m.gguf", network)
    raw = bytearray((tmp_path / "m.gguf").read_bytes())
    name = b"output_norm.weight"
    at = raw.index(name) + len(name) + 4 + 8
    raw[at : at + 4] = (999).to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(WeightsError, match=r"output_norm\.weight has unknown type 999"):
        open_checkpoint(tmp_path / "m.gguf")


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_missing_shard_is_named(folder):
    write_index(folder, {NAME: "model-00001-of-00002.safetensors"})
    with pytest.raises(WeightsError, match=r"model-00001-of-00002.safetensors is missing"):
        open_checkpoint(folder)


def test_an_index_cannot_point_outside_the_folder(folder):
    write_index(folder, {NAME: "../model.safetensors"})
    with pytest.raises(WeightsError, match="not a plain file name"):
        open_checkpoint(folder)


def test_an_index_that_names_absent_tensors_is_refused(folder):
    write_index(folder, {"model.norm.bias": "model.safetensors"})
    with pytest.raises(WeightsError, match=r"model.norm.bias should be in model.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="no readable weight_map"):
        open_checkpoint(folder)


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model.safetensors is missing"):
        open_checkpoint(folder)


@pytest.mark.model
def test_the_demo_models_shapes_fit_its_config(demo_model_path):
    checkpoint = open_checkpoint(demo_model_path)
    expected = expected_shapes(checkpoint.family.parameters(checkpoint.config))
    assert expected == {name: checkpoint.source.shapes()[name] for name in expected}
    assert (checkpoint.config.num_heads, checkpoint.config.num_kv_heads) == (9, 3)
    assert checkpoint.config.eos_token_ids == {2}
