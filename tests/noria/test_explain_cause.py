"""Each cause is named where it is the cause, and not where it is not."""

import pytest

from noria.explain.observation import Asked, Failure, Observation
from noria.explain.story import story_of
from noria.explain.verdict import Cause
from tests.support.observed import answer, delta, record, timeline

SECOND = 1_000_000
ASKED = Asked([("user", "q")])
CONVERSATION = Asked([("user", "long " * 100), ("assistant", "a"), ("user", "short")])


def verdict(arrivals=(), told=None, asked=ASKED, failure=None):
    told = told or timeline(prefill=90_000)
    last = arrivals[-1].at_us if arrivals else told.total_us
    wall_us = max(last, told.total_us)
    return story_of(Observation(asked, wall_us, arrivals, told, failure)).verdict


def late(asked=ASKED, first_us=2 * SECOND, **told):
    return verdict([delta(first_us)], timeline(**told), asked)


def test_a_prompt_and_steady_answer_is_nothing_unusual():
    assert verdict(answer(100)).cause is Cause.NOTHING
    assert verdict(answer(1)).cause is Cause.NOTHING
    assert verdict().cause is Cause.NOTHING


@pytest.mark.parametrize("where", ["queue", "batch_wait"])
def test_waiting_for_a_place_is_too_few_replicas(where):
    found = late(**{where: SECOND}, prefill=SECOND // 2)
    assert found.cause is Cause.TOO_FEW_REPLICAS
    assert "1.00 s of 2.00 s" in found.sentence
    assert "--workers" in found.sentence


def test_prefill_of_a_long_prompt_is_a_long_prompt():
    found = late(prompt=3000, prefill=SECOND)
    assert found.cause is Cause.LONG_PROMPT
    assert "3,000" in found.sentence
    assert late(prompt=255, prefill=SECOND).cause is Cause.OTHER


def test_a_start_in_time_has_no_cause_however_long_the_prompt():
    on_time = verdict([delta(499_000)], timeline(prompt=3000, prefill=400_000))
    assert on_time.cause is Cause.NOTHING


def test_earlier_turns_that_came_from_no_cache_are_a_prefix_computed_again():
    found = late(CONVERSATION, prompt=600, prefill=SECOND)
    assert found.cause is Cause.PREFIX_AGAIN
    assert "earlier turns" in found.sentence


def test_earlier_turns_from_a_cache_or_few_of_them_are_not():
    assert late(CONVERSATION, prompt=1200, cached=700, prefill=SECOND).cause is Cause.LONG_PROMPT
    short = Asked([("user", "a"), ("assistant", "b"), ("user", "long " * 100)])
    assert late(short, prompt=600, prefill=SECOND).cause is Cause.LONG_PROMPT
    only_questions = Asked([("user", "long " * 100), ("user", "short")])
    assert late(only_questions, prompt=600, prefill=SECOND).cause is Cause.LONG_PROMPT


def test_a_prefill_in_the_steps_of_others_is_a_crowded_batch():
    step = record(0, 16, token=7, beside=496, step_us=SECOND)
    found = verdict([delta(2 * SECOND, step)], timeline(prefill=SECOND))
    assert found.cause is Cause.CROWDED_BATCH


def test_a_slow_way_is_told_as_it_is():
    found = late(prefill=100)
    assert found.cause is Cause.OTHER
    assert "network" in found.sentence


def test_slow_tokens_in_full_steps_are_a_crowded_batch():
    slow = {"every_us": 80_000, "step_us": 78_000}
    crowded = verdict(answer(50, beside=8, **slow))
    assert crowded.cause is Cause.CROWDED_BATCH
    assert "80 ms" in crowded.sentence
    assert verdict(answer(50, beside=7, **slow)).cause is Cause.OTHER


def test_a_crowd_that_slows_nothing_is_no_cause():
    assert verdict(answer(50, beside=60, every_us=40_000)).cause is Cause.NOTHING


def test_slow_tokens_over_many_cached_ones_are_a_large_kv_cache():
    slow = {"every_us": 80_000, "step_us": 78_000}
    found = verdict(answer(50, prompt=2048, **slow), timeline(prompt=2048, prefill=90_000))
    assert found.cause is Cause.LARGE_KV_CACHE
    assert "2,07" in found.sentence
    short = verdict(answer(50, prompt=1900, **slow), timeline(prompt=1900, prefill=90_000))
    assert short.cause is Cause.OTHER


def test_quick_steps_whose_tokens_come_slowly_were_not_slowed_by_the_batch():
    found = verdict(answer(50, beside=60, every_us=80_000, step_us=10_000))
    assert found.cause is Cause.OTHER
    assert "outside the model" in found.sentence


def preempted(pause_us, num_before=20):
    before = answer(num_before, every_us=20_000)
    at_us = before[-1].at_us + pause_us
    computed = 16 + num_before
    again = [record(0, 10), record(10, computed - 10, token=7)]
    after = [delta(at_us + 20_000 * i, record(computed + i, token=7)) for i in range(1, 10)]
    return [*before, delta(at_us, *again), *after]


def test_a_lost_place_is_preemption_however_short_the_pause():
    for pause_us in (60_000, 3 * SECOND):
        found = verdict(preempted(pause_us), timeline(prefill=90_000, preemptions=1))
        assert found.cause is Cause.PREEMPTION
        assert "1 time" in found.sentence


def test_the_cause_that_lost_the_most_is_named():
    waited = [
        delta(a.at_us + 5 * SECOND, *a.event.content_block_delta.steps) for a in preempted(10)
    ]
    assert verdict(waited, timeline(queue=5 * SECOND)).cause is Cause.TOO_FEW_REPLICAS


def test_a_place_lost_before_the_first_token_is_preemption():
    steps = [record(0, 10), record(0, 16, token=7)]
    found = verdict([delta(2 * SECOND, *steps)], timeline(prefill=SECOND, preemptions=1))
    assert found.cause is Cause.PREEMPTION


def test_a_full_queue_is_too_few_replicas_and_other_failures_tell_what_to_do():
    full = verdict(failure=Failure("QUEUE_FULL", "m", "advice"))
    assert full.cause is Cause.TOO_FEW_REPLICAS
    lost = verdict(failure=Failure("WORKER_LOST", "m", "Ask again."))
    assert (lost.cause, lost.sentence) == (Cause.OTHER, "Ask again.")


def test_a_passed_deadline_has_the_cause_of_a_late_answer():
    passed = Failure("DEADLINE_EXCEEDED", "m", "Ask for fewer tokens.")
    waited = verdict(told=timeline(queue=SECOND), failure=passed)
    assert waited.cause is Cause.TOO_FEW_REPLICAS
    # Nobody said whether the worker had begun: waiting for it is no proof of a full batch.
    unknown = verdict(told=timeline(batch_wait=SECOND, queue=1), failure=passed)
    assert unknown.cause is not Cause.TOO_FEW_REPLICAS
    assert verdict(answer(9), failure=passed).sentence == "Ask for fewer tokens."
