"""The steps a stream told of are named for what they did."""

from noria.explain.observation import Asked, Observation
from noria.explain.steps import Stage, runs_of, steps_of
from tests.support.observed import delta, record, timeline


def steps(*records):
    arrivals = [delta(1, *records)]
    return steps_of(Observation(Asked([("user", "q")]), 9, arrivals, timeline(prompt=16)))


def test_chunks_of_the_prompt_then_one_position_a_step_fed_with_the_last_token():
    told = steps(record(0, 8), record(8, 8, token=5), record(16, token=6), record(17, token=2))
    assert [(step.stage, step.number) for step in told] == [
        (Stage.PREFILL, 0), (Stage.PREFILL, 0), (Stage.DECODE, 1), (Stage.DECODE, 2),
    ]  # fmt: skip
    assert [step.token_in.id for step in told[2:]] == [5, 6]
    assert told[0].chosen is None
    assert told[1].last_position == 15


def test_a_last_chunk_of_one_position_is_prefill():
    told = steps(record(0, 15), record(15, 1, token=5), record(16, token=6))
    assert [step.stage for step in told] == [Stage.PREFILL, Stage.PREFILL, Stage.DECODE]


def test_what_was_computed_before_is_computed_again_and_counting_goes_on():
    told = steps(
        record(0, 16, token=5), record(16, token=6),
        record(0, 10), record(10, 8, token=7), record(18, token=8),
    )  # fmt: skip
    runs = [[step.stage for step in run] for run in runs_of(told)]
    assert runs == [[Stage.PREFILL], [Stage.DECODE], [Stage.AGAIN] * 2, [Stage.DECODE]]
    assert (told[-1].number, told[-1].token_in.id) == (2, 7)


def test_a_token_in_that_was_never_told_is_left_out():
    assert steps(record(16, token=6))[0].token_in is None
    assert steps() == []
