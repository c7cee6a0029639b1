"""GGUF tensors of each type are what the format defines and the gguf package computes."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize

from noria.models.family import GGUFTensor
from noria.service.gguf_file import read_gguf
from worker.models.gguf_weights import GGUFWeights

ROWS, BLOCKS_A_ROW = 3, 2
HALF = np.float16


def scale_of(block, at):
    return np.frombuffer(block[at : at + 2], HALF).astype(np.float32)[0]


def nibbles(raw):
    """Low ones, then high ones."""
    values = np.frombuffer(raw, np.uint8)
    return np.concatenate([values & 15, values >> 4]).astype(np.float32)


def q4_0(block):
    return (nibbles(block[2:]) - 8) * scale_of(block, 0)


def q4_1(block):
    return nibbles(block[4:]) * scale_of(block, 0) + scale_of(block, 2)


def q5_0(block):
    """A fifth bit of each value, in one 32-bit word."""
    fifth = np.unpackbits(np.frombuffer(block[2:6], np.uint8), bitorder="little")
    return (nibbles(block[6:]) + 16.0 * fifth - 16) * scale_of(block, 0)


def q8_0(block):
    return np.frombuffer(block[2:], np.int8).astype(np.float32) * scale_of(block, 0)


def q4_k(block):
    """Eight groups of 32: six-bit scales and least values, by one half-precision unit each."""
    unit, least_unit, packed = scale_of(block, 0), scale_of(block, 2), block[4:16]
    values = []
    for group in range(8):
        if group < 4:
            scale, least = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            least = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        raw = np.frombuffer(block[16 + 32 * (group // 2) : 48 + 32 * (group // 2)], np.uint8)
        quants = raw & 15 if group % 2 == 0 else raw >> 4
        values.append(quants * (unit * np.float32(scale)) - least_unit * np.float32(least))
    return np.concatenate(values)


def q6_k(block):
    """Two halves of 128, each of four runs of 32: four low bits and two high ones."""
    low, high = (np.frombuffer(part, np.uint8) for part in (block[:128], block[128:192]))
    scales, unit = np.frombuffer(block[192:208], np.int8).astype(np.float32), scale_of(block, 208)
    values = []
    for half in range(2):
        for run in range(4):
            first = 64 * half + 32 * (run % 2)
            four = low[first : first + 32] >> (4 * (run // 2)) & 15
            two = high[32 * half : 32 * half + 32] >> (2 * run) & 3
            quants = (four | two << 4).astype(np.float32) - 32
            by = np.repeat(scales[8 * half + 2 * run : 8 * half + 2 * run + 2], 16)
            values.append(quants * (unit * by))
    return np.concatenate(values)


DEFINITIONS = {
    "F32": lambda block: np.frombuffer(block, np.float32),
    "F16": lambda block: np.frombuffer(block, HALF).astype(np.float32),
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q6_K": q6_k,
}


def random_rows(kind):
    """uint8 [ROWS, bytes a row] whose scales are finite."""
    block, size = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(5)
    if block == 1:
        values = generator.normal(size=(ROWS, 64)).astype(np.float32 if size == 4 else HALF)
        return values.view(np.uint8)
    blocks = generator.integers(0, 256, (ROWS * BLOCKS_A_ROW, size), dtype=np.uint8)
    halves = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}.get(kind.name, (0,))
    for at in halves:
        scales = generator.normal(0, 0.01, (len(blocks), 1)).astype(HALF)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_dequantisation_follows_the_format_and_the_gguf_package(tmp_path, name):
    kind = GGMLQuantizationType[name]
    raw, (block, size) = random_rows(kind), GGML_QUANT_SIZES[kind]
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = GGUFWeights(read_gguf(tmp_path / "m.gguf"), {"ours": GGUFTensor("w")})
    read = weights.read("ours").numpy()
    assert read.shape == weights.shapes()["ours"] == (ROWS, raw.shape[1] // size * block)
    assert np.array_equal(read, dequantize(raw, kind))
    blocks = raw.reshape(-1, size)
    defined = np.concatenate([DEFINITIONS[name](one.tobytes()) for one in blocks])
    assert np.allclose(read, defined.reshape(read.shape), rtol=1e-6, atol=1e-7)


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize("fixture", ["demo_model_path", "gemma_model_path"])
def test_every_tensor_of_the_real_files_is_as_the_gguf_package_has_it(fixture, request):
    """All types that they hold are among those above."""
    file = read_gguf(request.getfixturevalue(fixture))
    weights = GGUFWeights(file, {name: GGUFTensor(name) for name in file.tensors})
    for name, info in file.tensors.items():
        kind = GGMLQuantizationType(info.ggml_type)
        assert kind.name in DEFINITIONS
        block, size = GGML_QUANT_SIZES[kind]
        count = int(np.prod(info.shape)) // block * size
        raw = np.frombuffer(file.data, np.uint8, count, info.offset)
        expected = dequantize(raw.reshape(*info.shape[:-1], -1), kind)
        assert np.array_equal(weights.read(name).numpy(), expected), name
