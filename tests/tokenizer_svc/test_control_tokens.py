"""Control tokens: found in trusted text, broken in everything else."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer_svc.control_tokens import ControlToken, ControlTokens

TOKENS = ("<|im_start|>", "<|im_end|>", "<|im|>", "<eos>", "<<eos>", "ab", "bc", "abcd")
control = ControlTokens(ControlToken(text, i) for i, text in enumerate(TOKENS))
MARK = "\ufdd0"
# Text that is likely to hold, begin or end control tokens.
fragments = st.lists(st.sampled_from([*TOKENS, "<", "|", "im_", "<|im", "eos>", "a", "bcd", " "]))
texts = fragments.map("".join)


def test_text_is_split_at_the_longest_token():
    """Where one token begins another, the longer one counts."""
    assert list(control.split("x<|im_start|>y<<eos>abcdab")) == ["x", 0, "y", 4, 7, 5]
    assert list(control.split("")) == []


@given(texts)
def test_split_agrees_with_a_plain_alternation(text):
    """The trie finds what a list of all tokens, longest first, would find."""
    longest_first = sorted(TOKENS, key=len, reverse=True)
    found = re.findall("|".join(map(re.escape, longest_first)), text)
    parts = [p for p in control.split(text) if isinstance(p, int)]
    assert [TOKENS[i] for i in parts] == found
    assert "".join(TOKENS[p] if isinstance(p, int) else p for p in control.split(text)) == text


def spans(text):
    """Where control tokens are found."""
    at, found = 0, []
    for part in control.split(text):
        length = len(TOKENS[part]) if isinstance(part, int) else len(part)
        if isinstance(part, int):
            found.append((at, at + length))
        at += length
    return found


@given(texts, st.sampled_from(TOKENS), st.integers(0, 12))
def test_no_token_takes_in_part_of_a_neutralised_text(text, token, cut):
    """Not even one that the text before it begins, or the text after it ends."""
    before, after, inner = token[:cut], token[cut:], control.neutralise(text, MARK)
    assert all(end <= len(before) for _, end in spans(before + inner))
    assert all(start >= len(inner) for start, _ in spans(inner + after))


@given(texts)
def test_markers_can_be_taken_out_again(text):
    """What a user wrote is what the model reads."""
    assert control.neutralise(text, MARK).replace(MARK, "") == text


def test_ordinary_text_is_left_alone():
    """No marker where there is nothing to break, so that templates see the text as it is."""
    text = "a < b, see <b>this</b> | that"
    assert control.neutralise(text, MARK) == text


def test_a_token_gets_one_marker():
    """However long the token: what a message may grow by is bounded by its own length."""
    assert control.neutralise("<|im_start|>x<<eos>", MARK) == (
        f"<{MARK}|im_start|>x<{MARK}<{MARK}eos>"
    )


def test_a_marker_never_hides_space_from_a_template_that_trims():
    """A token's beginning at the end of the text is closed before the spaces."""
    assert control.neutralise(" eos> x <|im_ \n", MARK) == f" {MARK}eos> x <|im_{MARK} \n"


def test_flags_take_in_spaces_and_need_word_borders():
    """`lstrip`, `rstrip` and `single_word` as in the tokenizers library."""
    flagged = ControlTokens(
        [
            ControlToken("<l>", 1, lstrip=True),
            ControlToken("<r>", 2, rstrip=True),
            ControlToken("[w]", 3, single_word=True),
        ]
    )
    assert list(flagged.split("a \n<l> b<r>  c[w]d [w] ")) == ["a", 1, " b", 2, "c[w]d ", 3, " "]


def test_a_token_of_one_letter_is_refused():
    """It could not be told from the same letter in ordinary text."""
    with pytest.raises(ValueError, match="control token § has 1 letters; from 2 to 256"):
        ControlTokens([ControlToken("§", 1)])


def test_a_token_as_long_as_a_page_is_refused():
    """Published ones have about 40 letters; the pattern for them nests as deep as they are long."""
    ControlTokens([ControlToken("<" + "a" * 255, 1)])
    with pytest.raises(ValueError, match=r"^control token <a{39} has 257 letters; from 2 to 256$"):
        ControlTokens([ControlToken("<" + "a" * 256, 1)])


def test_many_tokens_cost_no_more_than_few():
    """A vocabulary with thousands of reserved tokens does not slow hostile text down."""
    many = ControlTokens(ControlToken(f"<|reserved_{i}|>", i) for i in range(5000))
    start = time.perf_counter()
    assert list(many.split("<|reserved_" * 20_000)) == ["<|reserved_" * 20_000]
    assert time.perf_counter() - start < 2
