"""GGUF headers: damaged and hostile ones are refused with their place, before memory is spent."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.service.gguf_file import GGUFError, read_gguf

U32, F32, TEXT, ARRAY = 4, 6, 8, 9


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key, kind, raw):
    return text(key) + struct.pack("<I", kind) + raw


ARCHITECTURE = entry("general.architecture", TEXT, text("llama"))
EMPTY_ARRAY = struct.pack("<IQ", U32, 0)
NESTED = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(3000))


def header(*entries, num_values=None, num_tensors=0, rest=b""):
    count = len(entries) if num_values is None else num_values
    start = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count)
    return start + b"".join(entries) + rest + bytes(64)


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        return path

    return write


def test_a_header_is_read(written):
    """Tensors begin at the next multiple of the alignment."""
    alignment = entry("general.alignment", U32, struct.pack("<I", 64))
    tensor = text("t") + struct.pack("<IQQIQ", 2, 3, 5, 0, 64)
    file = read_gguf(written(header(ARCHITECTURE, alignment, num_tensors=1, rest=tensor)))
    assert file.metadata == {"general.architecture": "llama", "general.alignment": 64}
    assert file.tensors["t"].shape == (5, 3)
    assert file.tensors["t"].offset % 64 == 0


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ((ARCHITECTURE, entry("general.alignment", U32, bytes(4))), "general.alignment is 0;"),
        ((ARCHITECTURE, entry("general.alignment", ARRAY, EMPTY_ARRAY)), "alignment is list;"),
        (
            (ARCHITECTURE, entry("general.alignment", F32, struct.pack("<f", float("inf")))),
            "general.alignment is inf;",
        ),
        ((ARCHITECTURE, entry("x", ARRAY, NESTED)), "an array of arrays"),
        (
            (ARCHITECTURE, entry("x", ARRAY, struct.pack("<IQ", TEXT, 2**62))),
            r"an array of 4611686018427387904 entries in a file of \d+ bytes",
        ),
        ((entry("general.architecture", ARRAY, EMPTY_ARRAY),), "no general.architecture"),
    ],
)
def test_hostile_values_are_refused(written, entries, problem):
    with pytest.raises(GGUFError, match=problem):
        read_gguf(written(header(*entries)))


def test_a_count_beyond_the_file_is_refused(written):
    for counts in ({"num_values": 2**60}, {"num_tensors": 2**60}):
        with pytest.raises(GGUFError, match="damaged header near byte"):
            read_gguf(written(header(ARCHITECTURE, **counts)))


@given(st.integers(0, 200), st.binary(min_size=1, max_size=8))
def test_any_damage_is_a_gguf_error_or_harmless(tmp_path_factory, at, damage):
    """Whatever bytes stand where: no other exception, and never a crash."""
    alignment = entry("general.alignment", U32, struct.pack("<I", 32))
    words = entry("x", ARRAY, struct.pack("<IQ", TEXT, 2) + text("a") + text("b"))
    tensor = text("t") + struct.pack("<IQQIQ", 2, 3, 5, 0, 0)
    content = header(ARCHITECTURE, alignment, words, num_tensors=1, rest=tensor)
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content[:at] + damage + content[at + len(damage) :])
    with contextlib.suppress(GGUFError):
        read_gguf(path)


def test_a_tensor_that_is_listed_twice_is_named(written):
    """However many there are, and wherever the two stand."""
    info = struct.pack("<IQIQ", 1, 3, 0, 0)
    names = [text(f"t{i}") for i in range(30_000)]
    rest = b"".join(name + info for name in (*names, names[29_998]))
    with pytest.raises(GGUFError, match="tensor t29998 is listed twice"):
        read_gguf(written(header(ARCHITECTURE, num_tensors=30_001, rest=rest)))
