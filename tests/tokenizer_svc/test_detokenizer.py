"""Ids into text: whole characters only, and the same text however the ids arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.vocabularies import bytes_vocabulary, vocabulary_of
from tokenizer_svc.detokenizer import Detokenizer, UnknownTokenError

FAMILY = "👩\u200d👩\u200d👧\u200d👦 "
BYTES = bytes_vocabulary()
END = 256
# Ids whose bytes are often characters, sometimes cut ones, sometimes no UTF-8 at all.
id_lists = st.lists(
    st.text(max_size=3).map(lambda s: list(s.encode()))
    | st.lists(st.integers(0, END), max_size=3)
    | st.sampled_from(FAMILY).map(lambda c: list(c.encode()[:2]))
).map(lambda parts: [i for part in parts for i in part])


def pieces_of(ids, *, skip_special=True):
    detokenizer = Detokenizer(BYTES, skip_special=skip_special)
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


@given(st.text())
def test_no_delta_holds_half_a_character(text):
    """DET-01: fed byte by byte, every delta is whole characters and no U+FFFD appears."""
    deltas = pieces_of(text.encode())
    assert "".join(deltas) == text
    assert [d for d in deltas if d] == list(text)


@given(id_lists)
def test_joined_deltas_equal_decoding_at_once(ids):
    """Also for cut characters, bytes that are no UTF-8, and control tokens in between."""
    data = b"".join(BYTES.pieces[i] for i in ids if i != END)
    assert "".join(pieces_of(ids)) == data.decode("utf-8", "replace")
    data = b"".join(BYTES.pieces[i] for i in ids)
    assert "".join(pieces_of(ids, skip_special=False)) == data.decode("utf-8", "replace")


def test_a_cut_character_comes_out_at_the_end():
    """As U+FFFD, and only there."""
    assert pieces_of("😀".encode()[:2]) == ["", "", "\ufffd"]
    assert pieces_of("a😀".encode()[:-1]) == ["a", "", "", "", "\ufffd"]


def test_control_tokens_are_left_out_unless_asked_for():
    """EOS is not text."""
    assert pieces_of([65, END, 66]) == ["A", "", "B", ""]
    assert pieces_of([65, END], skip_special=False) == ["A", "<|end|>", ""]


@pytest.mark.parametrize("token_id", [257, -1, 2**31, 2**40])
def test_ids_outside_the_vocabulary_are_refused(token_id):
    """Never an IndexError, never another id's text; nor is the id told to a log."""
    with pytest.raises(UnknownTokenError, match=r"^not below 257, "):
        Detokenizer(BYTES, skip_special=True).push(token_id)


def test_a_hole_in_the_vocabulary_is_no_text():
    """Padded vocabularies have ids without a token."""
    detokenizer = Detokenizer(vocabulary_of("a", b""), skip_special=True)
    assert [detokenizer.push(1), detokenizer.push(0)] == ["", "a"]


@pytest.mark.model
@pytest.mark.parametrize(
    "text", ["🦙", FAMILY, "구름이 걷히고", "e\u0301", "日本語", "\U0001f1f0\U0001f1f7"]
)
def test_real_tokens_that_split_characters(demo_model_path, text):
    """SmolLM2 spells these with parts of characters; no delta shows it."""
    from tokenizer_svc.text_service import load_text_service

    model = load_text_service(demo_model_path, "m")
    ids = model.codec.encode(text)
    detokenizer = Detokenizer(model.vocabulary, skip_special=True)
    deltas = [detokenizer.push(i) for i in ids] + [detokenizer.flush()]
    assert "".join(deltas) == text
    assert "\ufffd" not in "".join(deltas)
