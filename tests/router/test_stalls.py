"""A worker that holds work and ends no step gets nothing new; what has not begun moves on."""

import asyncio

import pytest
import structlog

from noria.reasons import Reason
from tests.router.fakes import (
    EOS,
    FakeClock,
    FakeWorker,
    events,
    failure,
    kinds,
    next_event,
    routed,
    until,
)


@pytest.fixture
def log():
    with structlog.testing.capture_logs() as lines:
        yield lines


async def pass_time(setup, clock, seconds, silent=()):
    """Move the clock; all but the silent workers report, with no further step."""
    clock.now += seconds
    for worker in setup.workers:
        if worker not in silent:
            worker.say_load()
    heard = {w.address for w in setup.workers if w not in silent}
    await until(
        lambda: all(w.load.received_at == clock.now
                    for w in setup.router.registry if w.worker_id in heard)
    )  # fmt: skip


@pytest.mark.parametrize("is_silent", [False, True])
async def test_unstarted_requests_leave_a_stalled_worker(is_silent, log):
    """Whether it still reports or is silent: after 5 s the other takes over, once."""
    clock = FakeClock()
    async with routed(FakeWorker(), FakeWorker(), clock=clock) as setup:
        call = setup.stream()
        stalled, other = await setup.holder()
        silent = [stalled] if is_silent else []
        await pass_time(setup, clock, 4.9, silent)
        await asyncio.sleep(0.05)
        assert not other.submits
        await pass_time(setup, clock, 0.2, silent)
        await until(lambda: other.submits)
        assert stalled.aborts == [1]
        other.finish(1, "eos", EOS)
        assert kinds(await events(call)).count("message_start") == 1
    (line,) = [line for line in log if line["event"] == "worker_stalled"]
    assert (line["worker_id"], line["moved"]) == (stalled.address, 1)
    assert line["step_age_s"] == pytest.approx(5.1)


async def test_a_stalled_worker_keeps_what_has_begun_and_gets_nothing_new(log):
    clock = FakeClock()
    async with routed(FakeWorker(), FakeWorker(), clock=clock) as setup:
        begun = setup.stream()
        stalled, other = await setup.holder()
        stalled.emit(1, 10)
        while not (await next_event(begun)).HasField("content_block_delta"):
            pass
        await pass_time(setup, clock, 5.1)
        await until(lambda: [x for x in log if x["event"] == "worker_stalled"])
        other.auto = [10]
        for _ in range(4):
            await events(setup.stream())
        assert len(stalled.submits) == 1
        stalled.finish(1, "eos", EOS)
        assert (await events(begun))[-1].HasField("message_stop")
        await until(lambda: [x for x in log if x["event"] == "worker_recovered"])
        stalled.auto = [10]
        for _ in range(2):
            await events(setup.stream())
        assert len(stalled.submits) == 2


async def test_alone_a_stalled_worker_keeps_its_requests(log):
    """There is nowhere else to go, and the step may end after all."""
    clock = FakeClock()
    async with routed(clock=clock) as setup:
        call = setup.stream()
        await setup.submitted(1)
        await pass_time(setup, clock, 9)
        await until(lambda: [x for x in log if x["event"] == "worker_stalled"])
        assert setup.worker.aborts == []
        setup.worker.finish(1, "eos", EOS)
        await events(call)


async def test_what_moves_from_stall_to_stall_ends_after_three_replacements():
    """Each of five workers takes it in and never ends a step; the fifth is not asked."""
    clock = FakeClock()
    workers = [FakeWorker() for _ in range(5)]
    for worker in workers:
        worker.acknowledge_aborts = False
    async with routed(*workers, clock=clock) as setup:
        call = setup.stream()
        for count in range(1, 5):
            await until(lambda n=count: sum(len(w.submits) for w in workers) == n)
            await pass_time(setup, clock, 5.1)
        assert (await failure(call))[1].reason is Reason.WORKER_LOST
        assert sorted(len(w.submits) for w in workers) == [0, 1, 1, 1, 1]
        for worker in workers:
            for number in list(worker.live):
                worker.finish(number, "aborted")
