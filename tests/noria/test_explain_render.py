"""Tables that fit 80 columns, whatever the request."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from noria.explain.observation import Asked, Failure, Observation
from noria.explain.render import show
from noria.explain.story import story_of
from tests.support.observed import answer, delta, record, timeline


def shown(arrivals, told=None, question="q", failure=None, **options):
    told = told or timeline(prefill=90_000, decode=400_000)
    last = arrivals[-1].at_us if arrivals else 0
    wall_us = max(last, told.total_us)
    seen = Observation(Asked([("user", question)]), wall_us, arrivals, told, failure)
    console = Console(file=io.StringIO(), width=80)
    show(story_of(seen), console, **options)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def steps_shown(lines):
    """The numbers of the decode steps in the step table."""
    words = [line.split() for line in lines if line.startswith("decode ")]
    return [second for _, second, *_ in words if second.isdecimal()]


def test_of_many_steps_the_first_and_the_last_are_shown_and_the_rest_counted():
    lines = shown(answer(101))
    assert steps_shown(lines) == ["1", "2", "3", "4", "5", "98", "99", "100"]
    assert any(line.startswith("...") and "21-112 in 92 steps" in line for line in lines)


def test_all_steps_are_shown_when_asked_for_with_runners_up():
    arrivals = answer(101)
    other = arrivals[3].event.content_block_delta.steps[0].runners_up.add()
    other.id, other.bytes, other.probability = 8, b"other", 0.25
    lines = shown(arrivals, all_steps=True)
    assert steps_shown(lines) == [str(number) for number in range(1, 101)]
    assert any('not "other"' in line and "0.25" in line for line in lines)


def test_no_row_stands_for_a_single_step():
    assert steps_shown(shown(answer(10))) == [str(number) for number in range(1, 10)]


def test_what_was_computed_again_is_told():
    again = [record(0, 10), record(10, 11, token=7), record(21, token=7)]
    lines = shown([*answer(5), delta(900_000, *again)])
    assert any(line.startswith("place lost") for line in lines)
    assert sum(line.startswith("recompute") for line in lines) == 2


@pytest.mark.parametrize(
    ("row_exact", "bits"), [(True, "are the same"), (False, "may differ a little")]
)
def test_what_computed_is_told_and_whether_its_bits_depend_on_the_batch(row_exact, bits):
    traced = record(16, 4, token=7)
    traced.attention_backend, traced.row_exact = "triton", row_exact
    text = " ".join(" ".join(shown([delta(90_000, traced)])).split())
    assert f"triton: its logits {bits} in any other batch" in text.replace(" worker ", " ")


def test_a_worker_that_does_not_say_what_computed_has_no_row_for_it():
    assert "computed by" not in " ".join(shown(answer(3)))


def test_a_prefix_from_the_cache_is_told():
    lines = shown([delta(90_000, record(16, 4, token=7))], timeline(prompt=20, prefill=9))
    text = " ".join(" ".join(lines).split())
    assert "16 tokens came from" in text


def test_a_broken_answer_tells_what_was_sent():
    told = timeline(prefill=90_000)
    told.usage.output_tokens = 3
    lines = shown(answer(3), told, failure=Failure("WORKER_LOST", "gone", "Ask again."))
    text = " ".join(" ".join(lines).split())
    assert "broken off" in text
    assert "3 tokens sent until then" in text
    assert "Ask again." in text


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=300), st.binary(max_size=30), st.integers(0, 10**6))
def test_no_line_is_wider_than_the_terminal(question, piece, first):
    step = record(first, 4000, token=2**32 - 1, piece=piece)
    told = timeline(prompt=first + 4000, prefill=10**10, decode=10**10)
    arrivals = [delta(10**10, step, text=question or "x")]
    assert max(cell_len(line) for line in shown(arrivals, told, question)) <= 80
