"""Faults that comparable systems were reported to have, each by the shortest way to provoke it."""

import asyncio
import resource
import signal
import sys
import time
from pathlib import Path

import grpc
import pytest
import structlog

from noria.reasons import Reason
from noria.v1 import chat_pb2, worker_pb2
from tests.router.fakes import (
    EOS,
    KEY,
    FakeTokenizer,
    FakeWorker,
    bearer,
    events,
    failure,
    next_event,
    routed,
    spec,
    texts,
    until,
)

MIB = 1024 * 1024
# Asks, says that its answer has begun, and waits to be killed.
ASKING = """
import sys, grpc
from noria.v1 import chat_pb2, chat_pb2_grpc
address, key, method = sys.argv[1:]
stub = chat_pb2_grpc.ChatServiceStub(grpc.insecure_channel(address))
block = chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text="hi"))
spec = chat_pb2.ChatSpec(messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER, content=[block])])
request = getattr(chat_pb2, method + "Request")(spec=spec)
answer = getattr(stub, method)(request, metadata=[("authorization", f"Bearer {key}")])
if method == "StreamChat":
    answer = list(answer)
"""


async def test_clients_mistakes_and_departures_close_no_worker():
    """RTR-01: refused as invalid by the worker, cancelled, expired; then good ones at once."""
    async with routed() as setup:
        for number in range(1, 21):
            call = setup.stream()
            await setup.submitted(number)
            setup.worker.refuse(number, worker_pb2.REFUSAL_CODE_INVALID, "bad", "logit_bias")
            assert (await failure(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
        gone = [setup.stream() for _ in range(3)]
        await setup.submitted(23)
        for call in gone:
            call.cancel()
        late = [setup.stream(timeout=0.05) for _ in range(3)]
        assert {(await failure(call))[0] for call in late} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        await setup.at_rest()
        setup.worker.auto = [10]
        assert [bool(await events(setup.stream())) for _ in range(3)] == [True] * 3


async def test_a_lost_worker_is_asked_by_nobody_and_shares_again_once_it_is_back():
    """RTR-02, RTR-05: none of the requests that had not begun fails, and none goes there; after
    its return no counter remembers the time before.
    """
    async with routed(FakeWorker(), FakeWorker()) as setup:
        lost, other = setup.workers
        unstarted = [setup.stream() for _ in range(4)]
        await until(lambda: lost.submits and other.submits)
        other.auto = [10]
        await lost.stop()
        for number in list(other.live):
            other.finish(number, "eos", EOS)
        assert [bool(await events(call)) for call in unstarted] == [True] * 4
        before = len(lost.submits)
        for _ in range(10):
            await events(setup.stream())
        assert len(lost.submits) == before
        lost.auto = [10]
        await lost.start()
        await until(lambda: sum(w.load is not None for w in setup.router.registry) == 2)
        counts = [len(worker.submits) for worker in setup.workers]
        for _ in range(20):
            await events(setup.stream())
        shares = [len(w.submits) - n for w, n in zip(setup.workers, counts, strict=True)]
        assert shares == [10, 10]


async def test_control_characters_and_line_separators_arrive_as_they_are():
    """DET-06: also text that looks like the framing of another protocol."""
    tokenizer = FakeTokenizer()
    pieces = ["\r", "\0", "\x1b", "\n\n", "\u2028", "\u0085", "data: x\n\n", "[DONE]"]
    tokenizer.pieces = dict(enumerate(pieces, start=10))
    async with routed(tokenizer=tokenizer) as setup:
        setup.worker.auto = list(tokenizer.pieces)
        assert "".join(texts(await events(setup.stream()))) == "".join(pieces)


@pytest.mark.parametrize("ending", ["eos", "length", "stop_id", "stop string", "aborted", "worker"])
async def test_an_answer_has_one_end_or_none(ending):
    """STR-01, STR-04: one stop reason after the last text, or a status and no stop reason."""
    tokenizer = FakeTokenizer()
    async with routed(tokenizer=tokenizer) as setup:
        call = setup.stream(stop_sequences=[" 12"])
        await setup.submitted(1)
        setup.worker.emit(1, 10)
        if ending == "worker":
            setup.worker.refuse(1, worker_pb2.REFUSAL_CODE_INTERNAL, "a traceback")
        elif ending == "stop string":
            setup.worker.emit(1, 12)
        else:
            setup.worker.finish(1, ending, EOS if ending == "eos" else 11)
        if ending in ("aborted", "worker"):
            received, error = await until_it_fails(call)
            assert "traceback" not in error.details()
            assert received
            assert not any(event.HasField("message_delta") for event in received)
            return
        received = [event.WhichOneof("event") for event in await events(call)]
        assert received.count("message_delta") == received.count("message_stop") == 1
        assert received[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def until_it_fails(call):
    """What came before the failure, and the failure."""
    received = []
    try:
        while True:
            received.append(await next_event(call))
    except grpc.aio.AioRpcError as error:
        return received, error


async def test_clients_that_read_nothing_hold_nobody_up():
    """STR-07: beside twenty of them answers come; each waits in a bounded outbox of its own."""
    tokenizer = FakeTokenizer()
    tokenizer.pieces = {1: "x" * 20_000}
    async with routed(FakeWorker(max_num_seqs=64), tokenizer=tokenizer) as setup:
        unread = [setup.stream() for _ in range(20)]
        await setup.submitted(20)
        for _ in range(10):
            for number in range(1, 21):
                setup.worker.emit(number, 1)
        setup.worker.auto = [10, 11]
        async with asyncio.timeout(5):
            for _ in range(5):
                assert "".join(texts(await events(setup.stream()))) == " 10 11"
        for call in unread:
            call.cancel()


@pytest.mark.parametrize(
    ("clients", "seconds"),
    [(10, 0), pytest.param(50, 120, marks=[pytest.mark.soak, pytest.mark.timeout(300)])],
)
async def test_clients_that_read_nothing_cost_a_bounded_memory(clients, seconds):
    """STR-07: for as long as they stay; what a stream holds is its outbox and what gRPC does."""
    tokenizer = FakeTokenizer()
    tokenizer.pieces = {1: "x" * 20_000}
    async with routed(FakeWorker(max_num_seqs=64), tokenizer=tokenizer) as setup:
        unread = [setup.stream(timeout=400) for _ in range(clients)]
        await setup.submitted(clients)
        setup.worker.auto = [10, 11]
        before, most, slowest_s = resident_bytes(), 0, 0.0
        until_s = time.monotonic() + seconds
        while len(setup.worker.aborts) < clients or time.monotonic() < until_s:
            for number in setup.worker.live:
                setup.worker.emit(number, 1)
            asked = time.monotonic()
            assert "".join(texts(await events(setup.stream()))) == " 10 11"
            slowest_s = max(slowest_s, time.monotonic() - asked)
            most = max(most, resident_bytes() - before)
        assert most < clients * 4 * MIB
        assert slowest_s < 2
        for call in unread:
            assert (await failure(call))[1].reason is Reason.SLOW_READER


def resident_bytes():
    """What this process holds of memory: router, tokenizer, worker and clients together."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("method", ["StreamChat", "Chat"])
async def test_a_client_whose_process_dies_stops_costing_within_a_second(method):
    """CAN-03, GRP-01: with a stream or waiting for a whole answer."""
    async with routed() as setup:
        asking = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ASKING, setup.router.address, KEY, method
        )
        await until(lambda: setup.worker.submits, timeout_s=20)
        setup.worker.emit(1, 10)
        await until(lambda: setup.tokenizer.opened)
        asking.send_signal(signal.SIGKILL)
        await asking.wait()
        await until(lambda: setup.worker.aborts == [1], timeout_s=1)
        await setup.at_rest()


async def test_ids_that_clients_bring_are_not_the_routers():
    """CAN-06: two calls with one id of the client's are two requests; each is cancelled alone."""
    brought = (("noria-request-id", "same"), ("x-request-id", "same"))
    async with routed() as setup:
        request = chat_pb2.StreamChatRequest(spec=spec())
        calls = [setup.stub.StreamChat(request, metadata=(*bearer(), *brought)) for _ in "ab"]
        ids = [dict(await call.initial_metadata())["noria-request-id"] for call in calls]
        assert len({"same", *ids}) == 3
        await setup.submitted(2)
        cancel = chat_pb2.CancelRequestRequest(request_id="same")
        code, _ = await failure(setup.stub.CancelRequest(cancel, metadata=bearer()))
        assert code is grpc.StatusCode.NOT_FOUND
        cancel = chat_pb2.CancelRequestRequest(request_id=ids[0])
        await setup.stub.CancelRequest(cancel, metadata=bearer())
        assert (await failure(calls[0]))[1].reason is Reason.CANCELLED
        (left,) = [s.submit_number for s in setup.worker.submits if s.id.startswith(ids[1])]
        setup.worker.finish(left, "eos", EOS)
        assert (await events(calls[1]))[-1].HasField("message_stop")


@pytest.mark.parametrize("size", [3.9 * MIB, 4.1 * MIB, 8 * MIB])
async def test_large_messages_meet_the_methods_own_limit(size):
    """GRP-04: below it they pass every hop; beyond it the status tells both sizes."""
    tokenizer = FakeTokenizer()
    tokenizer.prompt_ids = [1, 2, 3]
    async with routed(tokenizer=tokenizer) as setup:
        setup.worker.auto = [10]
        call = setup.stream("x" * int(size))
        if size < 4 * MIB:
            assert await events(call)
        else:
            code, error = await failure(call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert str(4 * MIB) in error.message.replace(",", "")


async def test_large_headers_and_a_million_ids_are_no_matter_of_the_transport():
    """GRP-04: 10 kB of metadata pass; so many ids are refused by the context's length."""
    async with routed() as setup:
        setup.worker.auto = [10]
        metadata = (*bearer(), ("x-note", "n" * 10_000))
        chat = chat_pb2.ChatRequest(spec=spec())
        assert (await setup.stub.Chat(chat, metadata=metadata)).choices
        completion = chat_pb2.CompletionSpec()
        completion.token_ids.ids.extend([1] * 1_000_000)
        request = chat_pb2.CompletionRequest(spec=completion)
        code, error = await failure(setup.stub.Completion(request, metadata=bearer()))
        assert (code, error.reason) == (
            grpc.StatusCode.INVALID_ARGUMENT, Reason.CONTEXT_LENGTH_EXCEEDED,
        )  # fmt: skip


A_TEXT = chat_pb2.ChatRequest(spec=spec("abc")).SerializeToString()
NO_MESSAGE = {
    "garbage": b"\xff" * 1000,
    "fields in fields": b"\x0a" * 5000,
    "groups": b"\x0b" * 5000,
    "a lone surrogate": A_TEXT.replace(b"abc", b"\xed\xa0\x80"),
}


@pytest.mark.parametrize("body", NO_MESSAGE.values(), ids=NO_MESSAGE)
@pytest.mark.parametrize("method", ["Chat", "StreamChat", "CountTokens", "GetRequest"])
async def test_bytes_that_are_no_message_are_refused_like_a_bad_field(method, body):
    """SEC-05, TOK-05: with id, line and count as any other; the next call is served."""
    with structlog.testing.capture_logs() as lines:
        async with routed() as setup, grpc.aio.insecure_channel(setup.router.address) as channel:
            kind = channel.unary_stream if method == "StreamChat" else channel.unary_unary
            send = kind(f"/noria.v1.ChatService/{method}")
            code, error = await failure(send(body, metadata=bearer(), timeout=5))
            assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD)
            assert [field for field, _ in error.fields] == ["request"]
            code, _ = await failure(send(body, metadata=bearer("wrong"), timeout=5))
            assert code is grpc.StatusCode.UNAUTHENTICATED
            setup.worker.auto = [10]
            assert await events(setup.stream())
    told = [line["outcome"] for line in lines if line["event"] in ("request", "lookup_refused")]
    one_line = ["INVALID_KEY", "SERVED"]
    assert told == (one_line if method == "GetRequest" else ["INVALID_FIELD", *one_line])
    assert not [line for line in lines if line["event"] == "defect"]


async def test_a_deadline_that_has_passed_already_is_refused_before_any_work():
    """GRP-08: the call says so itself, whether the router sees it or the transport does."""
    async with routed() as setup:
        for timeout in (0, 1e-9, -1):
            assert (await failure(setup.stream(timeout=timeout)))[0] is (
                grpc.StatusCode.DEADLINE_EXCEEDED
            )
        assert not setup.tokenizer.encoded
