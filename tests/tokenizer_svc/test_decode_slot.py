"""One slot: ids in, certain text out, the same however the ids are grouped."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.reasons import Reason, RequestError
from tests.support.vocabularies import bytes_vocabulary, vocabulary_of
from tokenizer_svc.decode_slot import DecodedText, DecodeSlot, SlotOptions, StopFound
from tokenizer_svc.detokenizer import UnknownTokenError

BYTES = bytes_vocabulary()
STOP_WORDS = vocabulary_of("STOP", "#" * 80, "<eos>", b"\xf0\x9f", special=("<eos>",))


def run(slot, groups):
    return "".join([*(slot.feed(group) for group in groups), slot.flush()])


@given(
    st.lists(st.sampled_from([*"ab한".encode(), 256, 0xF0]), max_size=30),
    st.lists(st.text("ab한", min_size=1, max_size=4), max_size=3),
    st.integers(0, 9),
    st.data(),
)
def test_split_at_any_token_boundary_the_joined_text_is_the_same(ids, stops, min_tokens, data):
    """Text, stop verdict and counts do not depend on how ids are grouped into deltas."""
    options = SlotOptions(tuple(stops), min_tokens)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=6)) | {0, len(ids)})
    groups = [ids[a:b] for a, b in itertools.pairwise(cuts)]
    whole, cut = DecodeSlot(BYTES, options), DecodeSlot(BYTES, options)
    assert run(whole, [ids]) == run(cut, groups)
    assert (whole.stop, whole.num_ids, whole.num_bytes) == (cut.stop, cut.num_ids, cut.num_bytes)


def test_a_stop_string_ends_the_output_at_its_id():
    """STP-01, STP-02: the text before it, the id that completed it, and nothing after."""
    slot = DecodeSlot(STOP_WORDS, SlotOptions(("OPST",)))
    assert slot.feed([0, 0, 0, 0]) == "ST"
    assert (slot.stop, slot.num_ids) == (StopFound(index=0, token_index=1), 2)
    assert slot.feed([0]) + slot.flush() == ""
    assert slot.num_ids == 2
    slot = DecodeSlot(STOP_WORDS, SlotOptions(("zzz", "####")))
    assert (slot.feed([1]), slot.stop) == ("", StopFound(index=1, token_index=0))


def test_min_tokens_lets_earlier_stop_strings_pass_as_text():
    """STP-07: the match must be completed by the min_tokens-th id or a later one."""
    for min_tokens, kept in ((0, 0), (1, 0), (5, 4)):
        slot = DecodeSlot(STOP_WORDS, SlotOptions(("STOP",), min_tokens))
        assert slot.feed([0] * 10) == "STOP" * kept
        assert slot.stop == StopFound(0, kept)
    slot = DecodeSlot(STOP_WORDS, SlotOptions(("STOP",), min_tokens=11))
    assert run(slot, [[0] * 10]) == "STOP" * 10
    assert slot.stop is None


def test_an_output_cut_in_a_character_ends_with_a_replacement():
    """DET-02: two of four bytes, then the end; whole or id by id."""
    assert run(DecodeSlot(STOP_WORDS, SlotOptions()), [[3]]) == "\ufffd"
    assert DecodeSlot(STOP_WORDS, SlotOptions()).pieces([3, 99]) == [b"\xf0\x9f", b""]


def test_control_tokens_are_no_text_and_no_part_of_stop_strings():
    """A skipped token between two halves of a stop string does not part them."""
    slot = DecodeSlot(STOP_WORDS, SlotOptions(("OPST",)))
    assert slot.feed([0, 2, 0]) == "ST"
    assert slot.stop == StopFound(0, 2)
    slot = DecodeSlot(STOP_WORDS, SlotOptions(("<eos>",), skip_special=False))
    assert slot.feed([0, 2]) == "STOP"
    assert slot.stop == StopFound(0, 1)


def test_an_unknown_id_is_an_error_of_this_slot():
    """DET-05: its text may be logged, so it does not name the id."""
    with pytest.raises(UnknownTokenError, match=r"^not below 4, the size of the vocabulary$"):
        DecodeSlot(STOP_WORDS, SlotOptions()).feed([0, 99])


@pytest.mark.parametrize(
    ("stops", "problem"),
    [
        (("a", ""), r"stop_sequences\[1\]: 0 bytes; from 1 to 256"),
        (("한" * 86,), r"stop_sequences\[0\]: 258 bytes; from 1 to 256"),
        (("a",) * 17, "stop_sequences: 17 strings; at most 16"),
        (("a" * 256,) * 4 + ("b",), "stop_sequences: 1025 bytes together; at most 1024"),
    ],
)
def test_bad_stop_strings_are_refused(stops, problem):
    """STP-08: empty, too long or too many, with the field and both numbers."""
    with pytest.raises(RequestError, match=problem) as caught:
        DecodeSlot(BYTES, SlotOptions(stops))
    assert caught.value.reason is Reason.INVALID_FIELD


def test_texts_of_a_slot_merge_into_one():
    """Text and pieces are joined, counts are the later ones, the offset is the earlier one."""
    first = DecodedText(1, 10.0, byte_offset=3, text=["a"], num_ids=1, pieces=[b"a"])
    later = DecodedText(1, 11.0, 4, ["b"], 2, StopFound(0, 1), closed=True, pieces=[b"b"])
    assert first.merge(later)
    expected = DecodedText(1, 10.0, 3, ["a", "b"], 2, StopFound(0, 1), True, [b"a", b"b"])
    assert first == expected
    assert not first.merge(later)
