"""A call of the worker that is cancelled at any of its awaits leaves nothing behind."""

import asyncio
import functools

import grpc
import pytest

from noria.service.channel import CLIENT_OPTIONS
from noria.service.tasks import keep_running
from noria.v1 import worker_pb2, worker_pb2_grpc
from tests.support.suspensions import LoopSuspensions, Suspensions, for_each
from tests.support.waiting import until
from tests.support.worker_client import GREEDY, worker_client
from worker import app, servicer
from worker.app import running_worker
from worker.config import WorkerConfig


@pytest.fixture
async def served(golden_model, script_file, monkeypatch):
    """The worker, its scheduler, a stub, and what watches its calls."""
    monkeypatch.setattr(app, "keep_running", functools.partial(keep_running, pause_s=0.01))
    suspensions = Suspensions(monkeypatch)
    for method in ("Session", "GetWorkerInfo"):
        suspensions.watch_call(servicer.WorkerServicer, method)
    for part in ("_read", "_write", "_watch"):
        suspensions.watch_part(servicer, part)
    script = script_file(mean_output_tokens=0)
    config = WorkerConfig(model=golden_model, script=script, listen="127.0.0.1:0")
    async with running_worker(config) as worker:
        facts = await worker.ready()
        async with grpc.aio.insecure_channel(worker.address, options=CLIENT_OPTIONS) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            yield worker, facts.scheduler, stub, suspensions


def held(worker, scheduler):
    sequences = scheduler.num_running + scheduler.num_waiting
    return worker.state().live_submits, sequences, scheduler.pool.num_used


async def generated(call):
    """Two answers of three tokens, then the end of the session."""
    hello = worker_pb2.RouterHello(protocol_version=1, router_instance_id="test")
    await call.write(worker_pb2.SessionRequest(hello=hello))
    assert (await call.read()).HasField("hello")
    for number in (1, 2):
        submit = worker_pb2.Submit(
            id=f"r{number}", submit_number=number, prompt_token_ids=[5, 9],
            max_tokens=3, sampling=GREEDY,
        )  # fmt: skip
        await call.write(worker_pb2.SessionRequest(submit=submit))
        while not (await call.read()).step.terminals:
            pass
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_session_cancelled_at_any_await_gives_everything_back(served):
    """Before hello, while it reads, writes or waits; the next session is answered."""
    worker, scheduler, stub, suspensions = served

    def ask():
        call = stub.Session(timeout=20)
        return call, generated(call)

    async def check():
        await until(lambda: held(worker, scheduler) == (0, 0, 0))
        async with worker_client(worker.address) as client:
            assert len(await client.generate([5, 9], 3)) == 3

    assert await for_each(suspensions, ask, check) >= 8


@pytest.mark.parametrize(("part", "least"), [("_read", 3), ("_write", 4), ("_watch", 1)])
async def test_a_session_ends_with_whichever_of_its_parts_ends(part, least, served, monkeypatch):
    """One that went on without its reader, writer or watch would hold its sequences for ever."""
    worker, scheduler, _, _ = served
    cut, cuts = LoopSuspensions(monkeypatch, servicer, part), 0
    async with worker_client(worker.address) as client:
        assert len(await client.generate([5, 9], 3)) == 3
    for number in range(1, least + 1):
        cut.cut_at(number)
        async with grpc.aio.insecure_channel(worker.address, options=CLIENT_OPTIONS) as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Session(timeout=20)
            await asyncio.gather(generated(call), return_exceptions=True)
            cuts += cut.hit
            cut.off()
        await until(lambda: held(worker, scheduler) == (0, 0, 0))
        async with worker_client(worker.address) as client:
            assert len(await client.generate([5, 9], 3)) == 3
    assert cuts == least


async def test_a_worker_tells_its_health_whatever_ends_the_telling(served, monkeypatch):
    """The loop behind the health name `live` is begun again wherever it is cancelled."""
    worker, _, _, _ = served
    told = []
    set_live = worker._server.set_live

    async def noting(server, live):
        told.append(live)
        await set_live(live)

    monkeypatch.setattr(type(worker._server), "set_live", noting)
    for number in (1, 2):
        for task in asyncio.all_tasks():
            if task.get_coro().__qualname__ == "RunningWorker.watch_steps":
                task.cancel()
        await until(lambda number=number: len(told) >= number)
    assert told == [True, True]


async def test_a_question_for_facts_cancelled_at_any_await_is_harmless(served):
    worker, scheduler, stub, suspensions = served

    def ask():
        call = stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=20)
        return call, answer_of(call)

    async def check():
        assert held(worker, scheduler) == (0, 0, 0)
        assert (await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).hello.model

    await for_each(suspensions, ask, check)


async def answer_of(call):
    await call
