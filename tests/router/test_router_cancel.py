"""However a request ends early, nothing stays held and the worker is told."""

import asyncio

import grpc
import pytest

from noria.reasons import Reason
from noria.v1 import chat_pb2
from tests.router.fakes import (
    EOS,
    FakeWorker,
    bearer,
    events,
    failure,
    next_event,
    routed,
    spec,
    until,
)

MOMENTS = ["encoding", "queued", "before the first token", "mid-stream", "unread"]
WAYS = ["closing", "CancelRequest", "deadline"]


async def bring_to(setup, call, moment):
    """Freeze the one request at this moment of its life."""
    if moment == "encoding":
        await until(lambda: setup.tokenizer.encoded)
    elif moment == "queued":
        await until(lambda: setup.router.held()["queued_tokens"])
    else:
        await setup.submitted(1)
    if moment in ("mid-stream", "unread"):
        for token_id in range(10, 15):
            setup.worker.emit(1, token_id)
    if moment == "mid-stream":
        while not (await next_event(call)).HasField("content_block_delta"):
            pass


async def end_by(setup, call, way) -> None:
    if way == "closing":
        call.cancel()
    elif way == "CancelRequest":
        request_id = dict(await call.initial_metadata())["noria-request-id"]
        request = chat_pb2.CancelRequestRequest(request_id=request_id)
        for _ in range(2):
            await setup.stub.CancelRequest(request, metadata=bearer())
        code, error = await failure(call)
        assert (code, error.reason) == (grpc.StatusCode.CANCELLED, Reason.CANCELLED)
        await setup.stub.CancelRequest(request, metadata=bearer())
    else:
        code, _ = await failure(call)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_cancelled_request_holds_nothing_and_stops_the_worker(moment, way):
    """At every moment, in every way: all counters at zero, the abort sent, the next one served."""
    async with routed() as setup:
        if moment == "encoding":
            setup.tokenizer.encode_gate.clear()
        if moment == "queued":
            setup.worker.say_load(running=4, free_blocks=0, waiting=1)
            await until(lambda: next(iter(setup.router.registry)).load.waiting == 1)
        call = setup.stream(timeout=0.3 if way == "deadline" else 20)
        await bring_to(setup, call, moment)
        await end_by(setup, call, way)
        await setup.at_rest()
        placed = moment not in ("encoding", "queued")
        assert setup.worker.aborts == ([1] if placed else [])
        setup.tokenizer.encode_gate.set()
        setup.worker.auto = [10]
        setup.worker.say_load()
        assert await events(setup.stream())
        assert len(setup.worker.submits) == 1 + placed


async def test_an_attempt_counts_until_the_worker_says_that_it_is_over():
    """After the abort was sent, its tokens stay in flight until the terminal entry."""
    async with routed() as setup:
        setup.worker.acknowledge_aborts = False
        call = setup.stream()
        await setup.submitted(1)
        call.cancel()
        await until(lambda: setup.worker.aborts == [1])
        await until(lambda: setup.router.held()["requests"] == 0)
        assert setup.router.held()["attempts"] == 1
        assert setup.router.held()["tokens_in_flight"] == 1000
        setup.worker.finish(1, "aborted")
        await setup.at_rest()


async def test_ids_after_an_abort_reach_nobody():
    """A step under way may still bring tokens for an aborted attempt."""
    async with routed() as setup:
        setup.worker.acknowledge_aborts = False
        call = setup.stream()
        await setup.submitted(1)
        call.cancel()
        await until(lambda: setup.worker.aborts == [1])
        setup.worker.emit(1, 10)
        setup.worker.finish(1, "eos", EOS)
        await setup.at_rest()
        assert not setup.tokenizer.opened


async def test_a_unary_chat_whose_client_goes_stops_the_worker():
    """CAN-03."""
    async with routed() as setup:
        call = setup.stub.Chat(chat_pb2.ChatRequest(spec=spec()), metadata=bearer())
        await setup.submitted(1)
        setup.worker.emit(1, 10)
        call.cancel()
        await until(lambda: setup.worker.aborts == [1])


async def test_an_unknown_id_is_not_found():
    async with routed() as setup:
        request = chat_pb2.CancelRequestRequest(request_id="req-unknown")
        code, error = await failure(setup.stub.CancelRequest(request, metadata=bearer()))
        assert (code, error.reason) == (grpc.StatusCode.NOT_FOUND, Reason.REQUEST_NOT_FOUND)


async def test_cancel_needs_a_key_and_a_reasonable_id():
    async with routed() as setup:
        request = chat_pb2.CancelRequestRequest(request_id="x" * 1000)
        code, _ = await failure(setup.stub.CancelRequest(request, metadata=bearer("wrong")))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        code, error = await failure(setup.stub.CancelRequest(request, metadata=bearer()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "1000" in error.message
        assert "128" in error.message


async def test_fifty_queued_requests_that_leave_never_reach_the_worker():
    """CAN-01: behind a full worker, closed streams leave the queue; the next one is served
    at once.
    """
    async with routed(FakeWorker(max_num_seqs=1)) as setup:
        running = setup.stream("running")
        await setup.submitted(1)
        setup.worker.say_load()
        waiting_at_worker = setup.stream("ahead")
        await setup.submitted(2)
        setup.worker.say_load(running=1, waiting=1)
        calls = [setup.stream(f"queued {n}") for n in range(50)]
        await until(lambda: setup.router.held()["permits"] == 50)
        for call in calls:
            call.cancel()
        await until(lambda: setup.router.held()["permits"] == 0)
        setup.worker.auto = [10]
        for number in (1, 2):
            setup.worker.finish(number, "eos", EOS)
        await asyncio.gather(events(running), events(waiting_at_worker))
        assert await events(setup.stream("next"))
        assert len(setup.worker.submits) == 3
