"""A worker that fails requests is asked less, and asked again once it serves."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.v1 import worker_pb2
from router.breaker import FIRST_REST_S, MAX_REST_S, Breaker
from router.policy import pick_worker
from tests.router.fakes import FakeWorker, events, routed, until
from tests.router.test_policy import NEED, worker


def opened(now=0.0):
    breaker = Breaker()
    for number in range(5):
        breaker.failed(number, now)
    return breaker


def test_four_failures_or_less_than_half_of_twenty_open_nothing():
    breaker = Breaker()
    for number in range(100):
        breaker.served(number) if number % 5 else breaker.failed(number, 0.0)
    assert breaker.admits(0.0)
    breaker = Breaker()
    for number in range(4):
        breaker.failed(number, 0.0)
    assert not breaker.is_open


def test_it_probes_with_one_at_a_time_and_closes_after_two_served():
    breaker = opened()
    assert not breaker.admits(FIRST_REST_S - 0.001)
    for number in (10, 11):
        assert breaker.admits(FIRST_REST_S)
        breaker.placed(number, FIRST_REST_S)
        assert not breaker.admits(FIRST_REST_S)
        breaker.served(number)
    assert not breaker.is_open


def test_a_failed_probe_doubles_the_rest_up_to_a_bound():
    breaker, now, rests = opened(), 0.0, []
    for number in range(10, 17):
        rest_s = next(s for s in (5.0, 10.0, 20.0, 40.0, 60.0) if breaker.admits(now + s))
        rests.append(rest_s)
        now += rest_s
        breaker.placed(number, now)
        breaker.failed(number, now)
    assert rests == [5, 10, 20, 40, 60, 60, MAX_REST_S]


def test_a_probe_that_says_nothing_makes_place_for_another():
    breaker = opened()
    breaker.placed(10, FIRST_REST_S)
    breaker.served(3)  # one from before
    breaker.passed(10)
    assert breaker.is_open
    assert breaker.admits(FIRST_REST_S)


@given(st.lists(st.sampled_from(["served", "passed"]), max_size=60))
def test_what_is_no_failure_never_opens_it(ends):
    breaker = Breaker()
    for number, end in enumerate(ends):
        breaker.placed(number, 0.0)
        getattr(breaker, end)(number)
    assert breaker.admits(0.0)


def test_a_failing_worker_is_passed_over_unless_all_are():
    failing, other = worker(name="failing"), worker(name="other")
    failing.breaker = opened()
    choice = pick_worker([failing, other], NEED, 0.0)
    assert choice.worker is other
    assert "1 of all failing" in choice.note
    assert pick_worker([failing], NEED, 0.0).worker is failing


class RefusingWorker(FakeWorker):
    """Answers every submit with the same refusal."""

    def __init__(self, code):
        super().__init__()
        self.code = code

    def _submitted(self, submit):
        super()._submitted(submit)
        self.refuse(submit.submit_number, self.code, "why")


@pytest.mark.parametrize("code", ["INTERNAL", "INVALID", "FULL"])
async def test_only_failures_of_its_own_take_a_worker_out(code):
    """RTR-01: shown among the workers by state; a new session begins as if nothing had been."""
    bad = RefusingWorker(getattr(worker_pb2, f"REFUSAL_CODE_{code}"))
    good = FakeWorker()
    good.auto = [10]
    async with routed(bad, good) as setup:
        for _ in range(30):
            await asyncio.gather(events(setup.stream()), return_exceptions=True)
        assert setup.router.state().workers["failing"] == (code == "INTERNAL")
        seen = len(bad.submits)
        if code == "INTERNAL":
            for _ in range(10):
                await events(setup.stream())
            assert len(bad.submits) == seen
            bad.break_session()
            await until(lambda: bad.instances == 2)
            await until(lambda: setup.router.state().workers["failing"] == 0)
