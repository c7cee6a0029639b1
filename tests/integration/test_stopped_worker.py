"""A worker's process that is stopped without dying: noticed, passed over, and used again."""

import asyncio
import signal

import pytest
import structlog

from noria import AsyncClient
from tests.support.processes import address, worker_fleet
from tests.support.stack import API_KEY
from tests.support.waiting import until

TOKENS = 40
# Loads come every half second; the documented thresholds are 2 s and 5 s.
SILENCE = {"load_ttl_s": 0.8, "stall_min_s": 1.0, "tick_s": 0.05}
FLAGS = ("--max-num-seqs", "16", "--num-blocks", "512", "--block-size", "16")


@pytest.fixture
def log():
    with structlog.testing.capture_logs() as lines:
        yield lines


def told(log, event):
    return [line["worker_id"] for line in log if line["event"] == event]


async def test_a_stopped_worker_is_noticed_and_used_again_once_it_goes_on(
    golden_model, script_file, log
):
    """RTR-04: what had not begun there is served elsewhere, what had goes on after SIGCONT."""
    script = script_file(mean_output_tokens=0, step_seconds=0.01, token_ids=[32, 127])
    settings = {"worker_flags": FLAGS, "router": SILENCE}
    async with (
        worker_fleet(golden_model, script, **settings) as (running, router, _),
        AsyncClient(router.address, api_key=API_KEY) as client,
    ):
        worker = running.children["worker 0"]
        place = await address(worker)

        def ask(count):
            asked = [client.chat(f"{n}", max_tokens=TOKENS, timeout=60) for n in range(count)]
            return [asyncio.create_task(question) for question in asked]

        def begun_there():
            there = next(w for w in router.registry if w.worker_id == place)
            return [a for a in there.attempts.values() if a.stream.has_begun]

        begun = ask(6)
        await until(begun_there)
        worker.process.send_signal(signal.SIGSTOP)
        unstarted = await asyncio.gather(*ask(12))
        assert told(log, "worker_stalled") == [place]
        assert max(result.timeline.attempts for result in unstarted) == 2
        assert place not in {result.timeline.worker_id for result in unstarted}
        later = await asyncio.gather(*ask(4))
        assert {result.timeline.attempts for result in later} == {1}
        assert place not in {result.timeline.worker_id for result in later}
        worker.process.send_signal(signal.SIGCONT)
        results = await asyncio.gather(*begun)
        assert place in {result.timeline.worker_id for result in results}
        assert {result.usage.output_tokens for result in results} == {TOKENS}
        await until(lambda: told(log, "worker_recovered"))
        again = await asyncio.gather(*ask(8))
        assert place in {result.timeline.worker_id for result in again}
        await until(lambda: set(router.held().values()) == {0})
