"""Stop strings: against an oracle that sees the whole text, however it is cut."""

import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer_svc.stop import StopAutomaton, StopMatcher


def matcher(*stops):
    return StopMatcher(StopAutomaton(stops))


def oracle(parts, stops, min_parts):
    """(text before the match, stop index, part index) or (whole text, None, None).

    Tries every end position in order, and at each the stop strings in list order.
    """
    whole = "".join(parts)
    ends_of = [sum(map(len, parts[: i + 1])) for i in range(len(parts))]
    for end in range(1, len(whole) + 1):
        part = next(i for i, stop_at in enumerate(ends_of) if end <= stop_at)
        if part + 1 < min_parts:
            continue
        for index, stop in enumerate(stops):
            if whole[:end].endswith(stop):
                return whole[: end - len(stop)], index, part
    return whole, None, None


def longest_begun(text, stops):
    """How long an ending of the text is a proper beginning of a stop string."""
    return max(
        (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0
    )


letters = st.sampled_from("ab한")
stop_lists = st.lists(st.text(letters, min_size=1, max_size=6), min_size=1, max_size=5)
part_lists = st.lists(st.text(letters, max_size=5), max_size=12)


@given(part_lists, stop_lists, st.integers(0, 6))
def test_cut_anywhere_the_result_is_the_oracles(parts, stops, min_parts):
    """Text before the match, which string, and at which part; what follows is dropped."""
    found = matcher(*stops)
    text, index, part = "", None, None
    for i, piece in enumerate(parts):
        certain, index = found.push(piece, counts=i + 1 >= min_parts)
        text += certain
        if index is not None:
            part = i
            break
    else:
        text += found.flush()
    assert (text, index, part) == oracle(parts, stops, min_parts)


@given(part_lists, stop_lists)
def test_held_back_is_exactly_what_may_become_a_stop_string(parts, stops):
    """No letter more, so that text is never late; no letter less, so that none must be undone."""
    found, seen, given_out = matcher(*stops), "", ""
    for piece in parts:
        certain, _ = found.push(piece, counts=False)
        seen += piece
        given_out += certain
        assert seen == given_out + seen[len(given_out) :]
        assert len(seen) - len(given_out) == longest_begun(seen, stops)


def test_a_stop_string_across_parts_is_found():
    """STP-01: `OPST` in `STOP` `STOP`; none of it is ever given out."""
    found = matcher("OPST")
    assert found.push("STOP", counts=True) == ("ST", None)
    assert found.push("STOP", counts=True) == ("", 0)


def test_a_stop_string_inside_one_part_is_found():
    """STP-02: the text after it is dropped."""
    assert matcher("####").push("#" * 80, counts=True) == ("", 0)
    found = matcher("#" * 81)
    assert found.push("#" * 80, counts=True) == ("", None)
    assert found.push("#" * 80, counts=True) == ("", 0)
    assert matcher("lo").push("hello world", counts=True) == ("hel", 0)


def test_held_back_text_comes_out_at_the_end():
    """STP-03: nothing lost, nothing twice."""
    found = matcher("STOPX", "STOPSTOPSTOPZ")
    assert [found.push("STOP", counts=True) for _ in range(3)] == [("", None)] * 3
    assert found.flush() == "STOPSTOPSTOP"
    assert found.flush() == ""


def test_text_that_begins_no_stop_string_is_never_late():
    """STP-04: a long stop string holds nothing back by its length."""
    found = matcher("X" * 250)
    for word in ("One", ", two", ", three"):
        assert found.push(word, counts=True) == (word, None)


def test_the_earliest_end_wins_then_the_order_of_the_list():
    """Two strings that end with the same letter: the first of the list."""
    assert matcher("abcd", "bc").push("abcd", counts=True) == ("a", 1)
    assert matcher("c", "bc").push("abc", counts=True) == ("ab", 0)
    assert matcher("bc", "c").push("abc", counts=True) == ("a", 0)


def test_a_match_that_does_not_count_is_text_and_may_begin_one_that_does():
    """STP-07: matches that end too early pass, also where the next one overlaps them."""
    found = matcher("aba")
    assert found.push("aba", counts=False) == ("ab", None)
    assert found.push("ba", counts=True) == ("", 0)


def test_an_empty_stop_string_is_refused():
    """STP-08: it would end every output before it began."""
    with pytest.raises(ValueError, match="empty"):
        StopAutomaton(["a", ""])


def test_the_longest_stop_strings_take_little_memory():
    """A slot with 1,024 letters of stop strings: about 16 bytes for each."""
    stops = [chr(ord("a") + i) * 64 for i in range(16)]
    StopAutomaton(stops)
    tracemalloc.start()
    try:
        kept = [StopAutomaton(stops) for _ in range(10)]
        size = tracemalloc.get_traced_memory()[0] / len(kept)
    finally:
        tracemalloc.stop()
    assert size < 32 * 1024


def test_a_letter_costs_the_same_however_much_is_held_and_however_many_strings():
    """The worst text for the longest list takes no longer than a small multiple of one string's."""
    stops = ["a" * 200 + chr(ord("b") + i) for i in range(16)]

    def duration(found):
        start = time.perf_counter()
        for _ in range(1000):
            found.push("a" * 200, counts=True)
        return time.perf_counter() - start

    one = min(duration(matcher("ab")) for _ in range(3))
    assert min(duration(matcher(*stops)) for _ in range(3)) < 8 * one
