"""What is told fits a line and cannot steer the terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.explain.steps import Token
from noria.explain.words import duration, percent, positions, probability, quoted, token_text


@given(st.text())
def test_quoted_text_is_one_printable_line(text):
    shown = quoted(text)
    assert len(shown.splitlines()) == 1
    assert all(character.isprintable() or character.isspace() for character in shown)
    assert "\x1b" not in shown


def test_tokens_are_spelled_and_cut_characters_keep_their_bytes():
    assert token_text(Token(4512, "네".encode())) == '"네"'
    assert token_text(Token(1, b"\n\x1b")) == '"\\n\\u001b"'
    assert token_text(Token(9, b"\xec\x97")) == '"\\xec\\x97"'
    assert token_text(Token(4513, b"")) == "#4513"
    assert quoted("a" * 50, 10) == '"aaaaaaaaa…"'


@pytest.mark.parametrize(
    ("us", "shown"),
    [
        (0, "0.0 ms"),
        (9_949, "9.9 ms"),
        (9_950, "10 ms"),
        (999_499, "999 ms"),
        (1_234_000, "1.23 s"),
    ],
)
def test_durations(us, shown):
    assert duration(us) == shown


def test_little_is_not_nothing_and_nearly_all_is_not_all():
    assert [percent(share) for share in (0, 0.001, 0.5, 0.999, 1)] == [
        "0 %", "<1 %", "50 %", ">99 %", "100 %",
    ]  # fmt: skip
    assert [probability(p) for p in (0.001, 0.7, 0.9999, 1.0)] == ["<0.01", "0.70", ">0.99", "1.00"]
    assert (positions(7, 7), positions(0, 15)) == ("7", "0-15")
