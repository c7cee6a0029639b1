"""One vocabulary, whichever file it comes from."""

import hashlib
import json
import re
import subprocess
import sys
import time

import pytest

from noria.service.token_bytes import token_bytes
from noria.service.vocabulary import (
    Vocabulary,
    VocabularyError,
    load_vocabulary,
    vocabulary_from_gguf,
)

GGUF = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["<|end|>", "a", "Ġb", "<tool>", "<|x|>", "[PAD5]"],
    "tokenizer.ggml.token_type": [3, 1, 1, 4, 4, 5],
    "tokenizer.ggml.eos_token_id": 0,
}


def write_folder(folder, **changes):
    """A folder that holds the same vocabulary as GGUF above."""
    added = [
        {"id": 0, "content": "<|end|>", "special": True},
        {"id": 3, "content": "<tool>", "special": False},
        {"id": 4, "content": "<|x|>", "special": False},
    ]
    tokenizer = {
        "model": {"type": "BPE", "vocab": {"a": 1, "Ġb": 2}, "merges": []},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": added,
    }
    files = {
        "tokenizer.json": tokenizer,
        "config.json": {"vocab_size": 6, "eos_token_id": 0},
        **changes,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_gguf_and_folder_of_one_model_give_one_vocabulary(tmp_path):
    """Holes, added tokens and control tokens mean the same in both kinds of file."""
    from_gguf = vocabulary_from_gguf(GGUF, "test")
    assert from_gguf == load_vocabulary(write_folder(tmp_path))
    assert from_gguf.pieces == (b"<|end|>", b"a", b" b", b"<tool>", b"<|x|>", b"")
    assert from_gguf.is_special == (True, False, False, False, True, False)


def test_fingerprint_is_the_documented_hash():
    """SHA-256 over `id TAB hex TAB special LF`, so that others can compute it too."""
    vocabulary = Vocabulary((b"a", b"", b"\xff<"), (False, False, True), ())
    text = "0\t61\t0\n1\t\t0\n2\tff3c\t1\n"
    assert vocabulary.fingerprint == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        Vocabulary((b"a", b"c"), (False, True), ()),
        Vocabulary((b"a", b"b"), (False, False), ()),
        Vocabulary((b"b", b"a"), (False, True), ()),
        Vocabulary((b"a", b"b", b""), (False, True, False), ()),
    ],
)
def test_fingerprint_tells_bytes_flags_order_and_length_apart(change):
    """Any difference that would change ids or texts changes the fingerprint."""
    assert change.fingerprint != Vocabulary((b"a", b"b"), (False, True), ()).fingerprint


def test_every_byte_has_a_letter():
    """The 256 letters of byte-level BPE decode to the 256 bytes, one to one."""
    golden = {"!": b"!", "Ġ": b" ", "Ċ": b"\n", "Ń": b"\xad", "ÿ": b"\xff", "é": b"\xe9"}
    assert {letter: token_bytes(letter) for letter in golden} == golden
    assert token_bytes("Ġíķľ") == " 한".encode()


def test_a_token_that_is_no_spelling_of_bytes_means_its_own_text():
    """Such tokens exist in real vocabularies; they are not refused."""
    assert token_bytes("a b") == b"a b"
    assert token_bytes("한") == "한".encode()


def test_eos_ids_come_from_all_places_that_name_one(tmp_path):
    """generation_config over config; the tokenizer's own EOS beside them; no doubles."""
    folder = write_folder(
        tmp_path,
        **{
            "generation_config.json": {"eos_token_id": [4, 0]},
            "tokenizer_config.json": {"eos_token": {"content": "<tool>"}},
        },
    )
    assert load_vocabulary(folder).eos_token_ids == (4, 0, 3)


def test_the_gguf_end_of_turn_is_an_eos_too():
    """Chat models end a turn with a token of its own."""
    vocabulary = vocabulary_from_gguf(GGUF | {"tokenizer.ggml.eot_token_id": 4}, "test")
    assert vocabulary.eos_token_ids == (0, 4)


def test_other_kinds_of_vocabulary_are_refused_by_name(tmp_path):
    """A tokenizer that cannot be read exactly is not read at all."""
    with pytest.raises(VocabularyError, match="'bert'; supported: 'gpt2' and 'llama'"):
        vocabulary_from_gguf(GGUF | {"tokenizer.ggml.model": "bert"}, "test")
    unigram = {"model": {"type": "Unigram", "vocab": []}, "decoder": {"type": "Metaspace"}}
    with pytest.raises(VocabularyError, match=r"'Unigram'.*'Metaspace'"):
        load_vocabulary(write_folder(tmp_path, **{"tokenizer.json": unigram}))


def test_damaged_files_are_refused_with_their_place(tmp_path):
    """No tokenizer.json, no JSON in it, or an EOS id that is not there."""
    with pytest.raises(VocabularyError, match="no tokenizer"):
        load_vocabulary(tmp_path)
    folder = write_folder(tmp_path, **{"generation_config.json": {"eos_token_id": 6}})
    with pytest.raises(VocabularyError, match="EOS id 6 in a vocabulary of 6 ids"):
        load_vocabulary(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(VocabularyError, match=r"tokenizer\.json: not JSON"):
        load_vocabulary(folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tokens": [1, 2]}, "malformed"),
        ({"tokens": 7}, "tokens is no list"),
        ({"tokens": "ab"}, "tokens is no list"),
        ({"tokens": []}, "without tokens"),
        ({"token_type": 7}, "malformed"),
        ({"eos_token_id": "x"}, "EOS id 'x'"),
        ({"eos_token_id": [0]}, "malformed"),
        ({"eos_token_id": 1.0}, r"EOS id 1\.0"),
    ],
)
def test_malformed_gguf_values_are_refused_with_their_file(changes, problem):
    """A worker or a tokenizer that cannot start says so in one line."""
    fields = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    tokens = changes.get("tokens")
    if isinstance(tokens, list):
        fields["tokenizer.ggml.token_type"] = [1] * len(tokens)
    with pytest.raises(VocabularyError, match=f"^file.*{problem}"):
        vocabulary_from_gguf(GGUF | fields, "file")


MODEL = {"type": "BPE", "vocab": {"a": 1}}


@pytest.mark.parametrize(
    ("file", "fields", "problem"),
    [
        ("tokenizer.json", {"model": {"type": "BPE"}}, r"malformed: KeyError: 'vocab'"),
        ("tokenizer.json", {"model": "BPE"}, "malformed: AttributeError"),
        ("tokenizer.json", {"model": MODEL | {"vocab": ["a"]}}, "malformed"),
        ("tokenizer.json", {"model": MODEL | {"vocab": {"a": -1}}}, "id is -1; from 0 to 4194303"),
        ("tokenizer.json", {"model": MODEL | {"vocab": {"a": "q"}}}, "id is 'q'"),
        ("tokenizer.json", {"model": MODEL | {"vocab": {"a": 10**12}}}, "id is 1000000000000;"),
        ("tokenizer.json", {"added_tokens": [{"content": "x"}]}, "malformed: KeyError: 'id'"),
        ("tokenizer.json", {"added_tokens": [{"id": 0, "content": 5, "special": True}]},
         "malformed"),
        ("tokenizer.json", {"added_tokens": 5}, "malformed"),
        ("tokenizer.json", {"decoder": {"type": "Sequence", "decoders": 5}}, "malformed"),
        ("config.json", {"vocab_size": "x"}, r"config\.json: vocab_size is 'x'"),
        ("config.json", {"vocab_size": 10**12}, r"vocab_size is 1000000000000; from 0"),
        ("config.json", {"eos_token_id": "x"}, "EOS id 'x'"),
        ("config.json", {"eos_token_id": {"a": 1}}, "malformed"),
    ],
)  # fmt: skip
def test_malformed_folders_are_refused_with_their_file(tmp_path, file, fields, problem):
    """Before any memory is spent on an id that is far beyond every vocabulary."""
    folder = write_folder(tmp_path)
    content = json.loads((folder / file).read_text()) | fields
    with pytest.raises(VocabularyError, match=rf"^{re.escape(str(tmp_path))}.*{problem}"):
        load_vocabulary(write_folder(tmp_path, **{file: content}))


def test_json_as_deep_as_it_is_long_is_refused(tmp_path):
    (write_folder(tmp_path) / "tokenizer.json").write_text("[" * 200_000)
    with pytest.raises(VocabularyError, match=r"tokenizer\.json: not JSON"):
        load_vocabulary(tmp_path)


def test_reading_needs_neither_torch_nor_tokenizers(golden_model):
    """Router-side tools and workers read vocabularies; neither library is theirs to load."""
    code = (
        "import sys; from pathlib import Path;"
        "from noria.service.vocabulary import load_vocabulary;"
        f"load_vocabulary(Path({str(golden_model)!r}));"
        "sys.exit(any(m in sys.modules for m in ('torch', 'tokenizers', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.model
def test_a_real_vocabulary_is_read_in_no_time(demo_model_path):
    """49,152 ids in under 0.3 s (the best of three: the tests may share the processor)."""
    durations = []
    for _ in range(3):
        start = time.perf_counter()
        vocabulary = load_vocabulary(demo_model_path)
        durations.append(time.perf_counter() - start)
    assert len(vocabulary) == 49_152
    assert vocabulary.eos_token_ids == (2,)
    assert min(durations) < 0.3
