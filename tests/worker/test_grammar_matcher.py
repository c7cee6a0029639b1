"""A matcher allows exactly what keeps the output inside its grammar."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.grammars import (
    CONTROL,
    EOS,
    LONGER,
    PIECES,
    TABLE,
    allowed,
    choice,
    compile_source,
    ids_of,
    json_schema,
    regex,
    takes,
)
from worker.grammar.source import GrammarError, GrammarKind, GrammarSource
from worker.grammar.tokens import TokenTable

ANY_OBJECT = GrammarSource(GrammarKind.JSON_OBJECT)
POINT = json_schema('{"type":"object","properties":{"x":{"type":"integer"}},"required":["x"]}')


def test_ends_come_where_the_grammar_may_end_and_alone_where_it_must():
    matcher = compile_source(regex("ab?")).matcher()
    assert EOS not in allowed(matcher)
    matcher.accept(ord("a"))
    assert allowed(matcher) == {ord("b"), EOS}
    matcher.accept(ord("b"))
    assert allowed(matcher) == {EOS}
    matcher.accept(EOS)
    assert not matcher.problem


def test_control_tokens_and_padding_are_never_allowed():
    matcher = compile_source(regex("(?s:.)*")).matcher()
    for text in ("", "<|control|", "ab"):
        for token_id in ids_of(text):
            matcher.accept(token_id)
        ids = allowed(matcher)
        assert CONTROL not in ids
        assert max(ids) == EOS < TABLE.size - 1


def test_tokens_of_several_bytes_are_allowed_where_all_their_bytes_are():
    abc, ab = PIECES.index(b"abc"), PIECES.index(b"ab")
    assert {ab, ord("a")} == allowed(compile_source(regex("ab|ax")).matcher())
    assert {ab, abc, ord("a")} == allowed(compile_source(regex("abcd")).matcher())


def test_characters_may_be_split_between_tokens_but_never_broken():
    grammar = compile_source(regex("[é-ü]"))
    first, second = "é".encode()
    assert allowed(grammar.matcher()) == {first, 256 + LONGER.index("é".encode())}
    assert second in allowed(grammar.matcher([first]))
    assert ord("a") not in allowed(grammar.matcher([first]))


@pytest.mark.parametrize(
    "text", ['{"x":1}', '{ "x": 1}', '{\n  "x": -20\n}', '{"x" : 0 , "y":[ ] }']
)
def test_json_may_be_written_in_one_line_or_indented(text):
    json.loads(text)
    assert takes(compile_source(POINT), text)


@pytest.mark.parametrize(
    "text",
    ['{  "x":1}', '{\n\n"x":1}', "{\n" + " " * 33 + '"x":1}', ' {"x":1}', '{"x":1} ', '{\t"x":1}'],
)
def test_white_space_between_json_tokens_is_bounded(text):
    assert not takes(compile_source(POINT), text)


def test_the_callers_way_of_writing_json_is_not_taken_from_the_schema():
    loose = '{"type":"object","x-guidance":{"whitespace_flexible":true,"lenient":true}}'
    assert not takes(compile_source(json_schema(loose)), "{     }")
    lenient = '{"not":{},"x-guidance":{"lenient":true}}'
    with pytest.raises(GrammarError, match='not supported: "not"'):
        compile_source(json_schema(lenient))


def test_any_object_is_an_object():
    grammar = compile_source(ANY_OBJECT)
    assert takes(grammar, '{"a":[1,null,{"b":"é\\n"}]}')
    assert not takes(grammar, "[1]")
    assert not takes(grammar, '{"a":NaN}')


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5), st.text(max_size=6))
def test_a_choice_is_each_of_its_strings_and_nothing_else(texts, other):
    grammar = compile_source(choice(*texts))
    assert all(takes(grammar, text) for text in texts)
    assert takes(grammar, other) == (other in texts)


@settings(max_examples=30, deadline=None)
@given(st.text(alphabet='ab/\n"\\x ', max_size=5))
def test_an_expression_matches_the_whole_output(text):
    for pattern in (r'a+/"?\n|b', "(ab|x)*", r"[ab\\]{1,3}", "a.b"):
        assert takes(compile_source(regex(pattern)), text) == bool(re.fullmatch(pattern, text))


def test_an_expression_is_only_an_expression():
    """Nothing in it is read as a part of the notation around it."""
    grammar = compile_source(regex('a/ "x" /b\nstart: /c/'))
    assert takes(grammar, 'a/ "x" /b\nstart: /c/')
    assert not takes(grammar, "c")


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_matcher_made_from_any_part_of_the_output_goes_on_alike(data):
    grammar = compile_source(POINT)
    matcher, output = grammar.matcher(), []
    for _ in range(20):
        ids = allowed(matcher)
        assert ids == allowed(grammar.matcher(output))
        token_id = data.draw(st.sampled_from(sorted(ids)))
        if token_id == EOS:
            json.loads(b"".join(PIECES[i] for i in output))
            break
        matcher.accept(token_id)
        output.append(token_id)


def test_output_that_does_not_follow_the_grammar_is_a_problem_of_that_matcher_alone():
    grammar = compile_source(regex("ab"))
    matcher = grammar.matcher(ids_of("b"))
    assert matcher.problem == "the output does not follow it"
    assert allowed(matcher) == set()
    assert allowed(grammar.matcher(ids_of("a"))) == {ord("b")}


def test_a_grammar_that_the_vocabulary_cannot_write_is_refused():
    letters = TokenTable((b"a", b"b", b"<end>"), [2], [2], 3)
    with pytest.raises(GrammarError, match="nothing that this model's vocabulary can write"):
        compile_source(regex("c"), letters)
    later = compile_source(regex("ac"), letters).matcher([0])
    assert allowed(later, 3) == set()
    assert later.problem == "nothing that this model's vocabulary can write satisfies it"


def test_a_model_without_eos_cannot_end_a_grammar():
    with pytest.raises(GrammarError, match="no EOS id"):
        compile_source(regex("a"), TokenTable((b"a",), [], [], 1))
