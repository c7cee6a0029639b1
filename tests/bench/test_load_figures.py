"""Every figure of a run is that of the server, whose timing is known exactly."""

import asyncio

import pytest

from bench.load.arrivals import ClosedLoop, OpenLoop, poisson
from bench.load.distributions import parse_lengths
from bench.load.outcome import CANCELLED, SERVED, Outcome
from bench.load.runner import Run, drive
from bench.load.summary import Objective, summarize
from bench.load.workload import Workload
from tests.support.virtual_time import run_virtually

TTFT_S, STEP_S = 0.25, 0.02
ANYTHING = Objective()


class Fleet:
    """Answers `at_once` requests at a time, two tokens a message, the next one when one ends."""

    def __init__(self, at_once=100, refuse_every=0):
        self.places = asyncio.Semaphore(at_once)
        self.refuse_every = refuse_every

    async def ask(self, request, outcome):
        clock = asyncio.get_running_loop().time
        outcome.sent_at = clock()
        if self.refuse_every and request.index % self.refuse_every == 0:
            outcome.ended, outcome.ended_at = "QUEUE_FULL", clock()
            return
        async with self.places:
            await asyncio.sleep(TTFT_S)
            for index in range(request.output_tokens // 2):
                if index:
                    await asyncio.sleep(2 * STEP_S)
                outcome.message_times.append(clock())
                if len(outcome.message_times) == request.cancel_after:
                    outcome.ended, outcome.ended_at = CANCELLED, clock()
                    return
        outcome.input_tokens, outcome.cached_tokens, outcome.output_tokens = (
            70,
            10,
            request.output_tokens,
        )
        outcome.ended, outcome.ended_at = SERVED, clock()


def run(fleet, arrivals, count, objective=ANYTHING, **workload):
    async def work():
        run, clock = Run(), asyncio.get_running_loop().time
        await drive(run, fleet, Workload(**workload).requests(count), arrivals, clock)
        return summarize(run, objective)

    return run_virtually(work())


def test_a_closed_loop_reports_the_servers_own_timing():
    """128 tokens in 64 messages: 250 ms to the first, 63 gaps of 40 ms: 2.77 s each."""
    summary = run(Fleet(), ClosedLoop(4), 40)
    each_s = TTFT_S + 63 * 2 * STEP_S
    assert summary.ended == {SERVED: 40}
    assert summary.wall_s == pytest.approx(10 * each_s)
    assert summary.output_tokens_per_s == pytest.approx(4 * 128 / each_s)
    assert summary.total_tokens_per_s == pytest.approx(4 * 198 / each_s)
    assert summary.requests_per_s == pytest.approx(4 / each_s)
    assert summary.tokens_per_message == 2
    assert (summary.input_tokens, summary.cached_tokens) == (2800, 400)
    for figures, expected in (
        (summary.ttft_ms, 250),
        (summary.message_gap_ms, 40),
        (summary.inter_token_ms, 63 * 40 / 127),
        (summary.end_to_end_ms, each_s * 1e3),
    ):
        for percentile in (figures.p50, figures.p90, figures.p99, figures.max):
            assert percentile == pytest.approx(expected)


def test_an_open_loop_counts_waiting_for_a_place_from_when_a_request_was_due():
    """One place, answers of 270 ms, a request every 100 ms: each waits 170 ms more."""
    fleet, times = Fleet(at_once=1), tuple(0.1 * index for index in range(5))
    summary = run(fleet, OpenLoop(times), 5, output_tokens=parse_lengths("4"))
    each_ms = 1e3 * (TTFT_S + 2 * STEP_S)
    waits = [index * (each_ms - 100) + 250 for index in range(5)]
    assert summary.ttft_ms.p50 == pytest.approx(waits[2])
    assert summary.ttft_ms.p90 == pytest.approx(waits[3] + 0.6 * (waits[4] - waits[3]))
    assert summary.ttft_ms.max == pytest.approx(waits[4])
    assert summary.generator_late_ms == pytest.approx(0, abs=1e-6)


def test_goodput_counts_those_that_kept_the_objective():
    fleet, times = Fleet(at_once=1), tuple(0.1 * index for index in range(5))
    lenient = Objective(ttft_ms=700, inter_token_ms=50)
    summary = run(fleet, OpenLoop(times), 5, lenient, output_tokens=parse_lengths("4"))
    assert summary.goodput_per_s * summary.wall_s == pytest.approx(3)
    strict = Objective(inter_token_ms=10)
    summary = run(Fleet(), OpenLoop(times), 5, strict, output_tokens=parse_lengths("4"))
    assert summary.goodput_per_s == 0


def test_refusals_and_closed_streams_are_counted_by_reason_and_stay_out_of_latencies():
    summary = run(Fleet(refuse_every=4), ClosedLoop(2), 40, cancel_share=0.5)
    refused, cancelled = summary.ended["QUEUE_FULL"], summary.ended[CANCELLED]
    assert refused == 10
    assert 5 <= cancelled <= 25
    assert summary.ended[SERVED] == 30 - cancelled
    assert summary.output_tokens == 128 * summary.ended[SERVED]
    assert summary.ttft_ms.max == pytest.approx(250)


def test_a_stream_that_brought_something_else_counts_for_no_latency_and_no_goodput():
    run = Run(ended_at=1.0)
    for fault, first in (("", 0.1), ("3 tokens for 4 asked", 0.9)):
        times = [first, first + 0.01]
        run.outcomes.append(
            Outcome(0, 0.0, message_times=times, output_tokens=2, ended=SERVED, fault=fault)
        )
    summary = summarize(run, ANYTHING)
    assert summary.faults == {"3 tokens for 4 asked": 1}
    assert summary.goodput_per_s == 1
    assert summary.ttft_ms.max == pytest.approx(100)


def test_poisson_arrivals_have_their_rate_and_are_the_same_for_everybody():
    load = poisson(20.0, 4000, seed=3)
    assert load == poisson(20.0, 4000, seed=3)
    assert load.times_s[-1] == pytest.approx(200, rel=0.05)


def test_a_run_that_is_interrupted_has_the_figures_of_what_had_ended():
    async def work():
        run, loop = Run(), asyncio.get_running_loop()
        asked = Workload().requests(10)
        driving = loop.create_task(drive(run, Fleet(), asked, ClosedLoop(2), loop.time))
        await asyncio.sleep(3)
        driving.cancel()
        await asyncio.wait([driving])
        return summarize(run, Objective())

    summary = run_virtually(work())
    assert summary.ended == {SERVED: 2}
    assert summary.wall_s == pytest.approx(3)
