"""Tokenizers of SentencePiece vocabularies, from GGUF metadata."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.service.vocabulary import VocabularyError, load_vocabulary, vocabulary_from_gguf
from tests.support.vocabularies import sentencepiece_metadata
from tokenizer_svc.control_tokens import ControlToken, ControlTokens
from tokenizer_svc.decode_slot import DecodeSlot, SlotOptions
from tokenizer_svc.sentencepiece_tokenizer import sentencepiece_from_gguf

CONTROL = ("<bos>", "<eos>")
# Pieces that would lead to control and byte tokens, too, if those were made by merging.
PIECES = (
    "▁a", "ab", "ba", "aba", "abab", "▁ab", "b▁", "bo", "<bo", "s>", "os", "<0", "x0", "A>",
    *"ab▁<>bos0xA한",
)  # fmt: skip
USER_DEFINED = ("  ", "   ", "\n", "\n\n", "<h>", "ab ab")
METADATA = sentencepiece_metadata(
    *dict.fromkeys(PIECES), control=CONTROL, user_defined=USER_DEFINED
)
VOCABULARY = vocabulary_from_gguf(METADATA, "test")
TOKENIZER = sentencepiece_from_gguf(METADATA, "test")
TOKENS = METADATA["tokenizer.ggml.tokens"]
texts = st.lists(
    st.sampled_from([*"ab <>0xA한é\n", "<bos>", "<0x0A>", "  ", "abab", "<h>", "😀"])
).map("".join)


def encode(text, tokenizer=TOKENIZER):
    return tokenizer.encode(text, add_special_tokens=False).ids


def pieces(text, tokenizer=TOKENIZER):
    return [TOKENS[i] for i in encode(text, tokenizer)]


def merged_by_score(text):
    """SentencePiece's rule, plainly: of all neighbours that make a token, the best first."""
    scores = {t: i for i, t in enumerate(dict.fromkeys(PIECES))}
    symbols = list(text.replace(" ", "▁"))
    while True:
        together = [a + b for a, b in itertools.pairwise(symbols)]
        pairs = [(scores[made], i) for i, made in enumerate(together) if made in scores]
        if not pairs:
            return symbols
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@given(st.text("ab <>os0xA", max_size=30).filter(lambda t: not any(u in t for u in USER_DEFINED)))
def test_the_best_score_is_merged_first(text):
    """As often as it takes, whatever the text."""
    assert pieces(text) == merged_by_score(text)


@given(texts)
def test_ids_mean_the_bytes_of_their_text(text):
    """Letters that are no token are told byte by byte; spaces and lines stay what they are."""
    ids = encode(text)
    assert b"".join(VOCABULARY.pieces[i] for i in ids) == text.encode()
    assert not any(VOCABULARY.is_special[i] for i in ids)


def test_text_that_spells_a_control_or_byte_token_stays_text():
    """Neither `<bos>` nor `<0x0A>` can be written: the pieces they would be made of stand alone."""
    assert pieces("<bos>") == ["<bo", "s>"]
    assert pieces("<0x0A>") == ["<0", "x0", "A>"]
    assert pieces("é") == ["<0xC3>", "<0xA9>"]


def test_user_defined_tokens_are_found_whole():
    """The longest first; runs of spaces before all merges, beside other pieces too."""
    assert pieces("a\n\n\nb") == ["a", "\n\n", "\n", "b"]
    assert pieces("ab ab<h>") == ["ab ab", "<h>"]
    assert pieces("a   a") == ["a", "   ", "a"]
    assert pieces("a a") == ["a", "▁a"]


@pytest.mark.parametrize(
    ("architecture", "told", "prefixed"),
    [
        ("llama", None, True),
        ("gemma3", None, False),
        ("llama", False, False),
        ("gemma", True, True),
    ],
)
def test_a_space_before_the_text(architecture, told, prefixed):
    """As the file says; silent files of Gemma mean none, silent files of others one."""
    metadata = METADATA | {"general.architecture": architecture}
    del metadata["tokenizer.ggml.add_space_prefix"]
    if told is not None:
        metadata["tokenizer.ggml.add_space_prefix"] = told
    tokenizer = sentencepiece_from_gguf(metadata, "test")
    assert pieces("ab", tokenizer) == (["▁ab"] if prefixed else ["ab"])


def test_a_vocabulary_that_could_not_spell_every_text_is_refused():
    """With both numbers."""
    kinds = [1 if kind == 6 else kind for kind in METADATA["tokenizer.ggml.token_type"]]
    with pytest.raises(VocabularyError, match="test: 0 byte tokens; 256 are needed"):
        sentencepiece_from_gguf(METADATA | {"tokenizer.ggml.token_type": kinds}, "test")
    with pytest.raises(VocabularyError, match=r"test: \d+ tokens but 0 scores"):
        sentencepiece_from_gguf(METADATA | {"tokenizer.ggml.scores": None}, "test")


def test_hugging_face_files_of_the_same_vocabulary_have_its_fingerprint(tmp_path):
    """Spaces are U+2581 there, in added tokens too; a row that a text model lacks is left out."""
    extra = {"id": len(TOKENS), "content": "<image_soft_token>", "special": True}
    added = [
        {"id": i, "content": t.replace(" ", "▁") if not t.strip() else t, "special": t in CONTROL}
        for i, t in enumerate(TOKENS)
        if t in (*CONTROL, *USER_DEFINED)
    ]
    added.append({"id": 0, "content": "<unk>", "special": True})
    definition = {
        "model": {"type": "BPE", "vocab": {t.replace(" ", "▁"): i for i, t in enumerate(TOKENS)}},
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": t} for t in ("Replace", "ByteFallback", "Fuse")],
        },
        "added_tokens": [*added, extra],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": len(TOKENS)}))
    assert load_vocabulary(tmp_path).fingerprint == VOCABULARY.fingerprint


def test_ends_of_turns_are_eos_whatever_the_file_names():
    """Gemma's files name `<eos>` alone; a chat would never end."""
    metadata = sentencepiece_metadata("a", control=("<bos>", "<eos>", "<end_of_turn>"))
    assert vocabulary_from_gguf(metadata, "test").eos_token_ids == (2, 3)


@given(texts, st.lists(st.text("ab <한", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_and_characters_over_byte_pieces(text, stops, data):
    """Text up to the first stop string, however the ids are grouped; no half character."""
    ids = encode(text)
    slot, parts, rest = DecodeSlot(VOCABULARY, SlotOptions(tuple(stops))), [], ids
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        parts.append(slot.feed(rest[:count]))
        rest = rest[count:]
    parts.append(slot.flush())
    # Of several that end with the same letter the first in the list counts.
    ends = [(text.find(s) + len(s), i, text.find(s)) for i, s in enumerate(stops) if s in text]
    assert "".join(parts) == (text[: min(ends)[2]] if ends else text)
    assert not any("\ufffd" in part for part in parts)


@given(texts)
def test_control_tokens_in_messages_are_broken_and_restored(text):
    """What a user writes holds none, and reads as written."""
    control = ControlTokens(ControlToken(t, i + 1) for i, t in enumerate(CONTROL))
    marked = control.neutralise(text, "\ufdd0")
    assert not any(isinstance(part, int) for part in control.split(marked))
    assert marked.replace("\ufdd0", "") == text
