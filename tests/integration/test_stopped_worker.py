"""A worker's process that is stopped without dying: noticed, passed over, and used again."""

import asyncio
import signal

import pytest
import structlog

from noria import AsyncClient, NoriaError
from noria.reasons import Reason
from router import worker_session
from tests.support.processes import address, worker_fleet
from tests.support.scraping import scrape
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


@pytest.mark.parametrize("keepalive_s", [1, pytest.param(None, marks=pytest.mark.soak)])
async def test_a_worker_stopped_for_longer_than_the_keepalive_is_lost_and_comes_back(
    keepalive_s, golden_model, script_file, log, monkeypatch
):
    """RTR-04: its streams end with WORKER_LOST and their usage, at the only other worker what
    had not begun is served; with SIGCONT it computes nothing for those who are gone.
    """
    shorten_keepalive(monkeypatch, keepalive_s)
    script = script_file(mean_output_tokens=0, step_seconds=0.01, token_ids=[32, 127])
    settings = {"worker_flags": FLAGS, "router": SILENCE}
    async with (
        worker_fleet(golden_model, script, **settings) as (running, router, _),
        AsyncClient(router.address, api_key=API_KEY) as client,
    ):
        worker = running.children["worker 0"]
        place = await address(worker)

        def ask(count, tokens=TOKENS):
            asked = [client.chat(f"{n}", max_tokens=tokens, timeout=90) for n in range(count)]
            return [asyncio.create_task(question) for question in asked]

        def attempts_there():
            there = [w for w in router.registry if w.worker_id == place]
            return [a for w in there for a in w.attempts.values() if a.stream.has_begun]

        begun = ask(8, 200)
        await until(lambda: len(attempts_there()) >= 2)
        worker.process.send_signal(signal.SIGSTOP)
        unstarted = ask(12)
        await until(lambda: told(log, "worker_disconnected"), timeout=60)
        assert told(log, "worker_disconnected") == [place]
        results = await asyncio.gather(*begun, *unstarted, return_exceptions=True)
        lost = [result for result in results if isinstance(result, NoriaError)]
        assert lost
        assert {error.reason for error in lost} == {Reason.WORKER_LOST}
        assert all(error.timeline.usage.output_tokens > 0 for error in lost)
        assert not [result for result in results[8:] if isinstance(result, NoriaError)]
        assert place not in {result.timeline.worker_id for result in results[8:]}
        worker.process.send_signal(signal.SIGCONT)
        await until(lambda: told(log, "worker_connected").count(place) == 2, timeout=60)
        # What it computed for those who are gone takes its places for a moment more.
        await until(lambda: all(w.load and not w.load.running for w in router.registry))
        again = await asyncio.gather(*ask(8))
        assert place in {result.timeline.worker_id for result in again}
        await until(lambda: set(router.held().values()) == {0})
        await idle(worker)


@pytest.mark.soak
async def test_what_waits_for_the_only_worker_is_served_once_it_goes_on(
    golden_model, script_file, log, monkeypatch
):
    """RTR-04: what had not begun is not lost with the session; patience and deadline bound it."""
    shorten_keepalive(monkeypatch, 1)
    script = script_file(mean_output_tokens=0, step_seconds=0.01, token_ids=[32, 127])
    settings = {"num_workers": 1, "worker_flags": FLAGS, "router": SILENCE}
    async with (
        worker_fleet(golden_model, script, **settings) as (running, router, _),
        AsyncClient(router.address, api_key=API_KEY) as client,
    ):
        worker = running.children["worker 0"]
        worker.process.send_signal(signal.SIGSTOP)
        waiting = [
            asyncio.create_task(client.chat(f"{n}", max_tokens=5, timeout=60)) for n in range(4)
        ]
        await until(lambda: told(log, "worker_disconnected"), timeout=60)
        worker.process.send_signal(signal.SIGCONT)
        results = await asyncio.gather(*waiting)
        assert {result.usage.output_tokens for result in results} == {5}
        await until(lambda: set(router.held().values()) == {0})


def shorten_keepalive(monkeypatch, seconds):
    """Have the router ask its workers this often whether they are there; None: as always."""
    if seconds is not None:
        names = ("keepalive_time_ms", "keepalive_timeout_ms", "http2.ping_timeout_ms")
        shorter = {f"grpc.{name}": seconds * 1000 for name in names}
        options = dict(worker_session.SESSION_OPTIONS) | shorter
        monkeypatch.setattr(worker_session, "SESSION_OPTIONS", tuple(options.items()))


async def idle(worker):
    """Wait until a worker holds nothing: neither what it was given anew nor what was before."""
    metrics = (await worker.event("listening"))["metrics"]
    for _ in range(200):
        values = await scrape(metrics)
        held = [values[f"noria_worker_{name}",] for name in ("live_submits", "kv_blocks_used")]
        if not any(held):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still held: {held}")
