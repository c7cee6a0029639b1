"""Who gets in: keys, fields, the queue's bounds, deadlines, the drain."""

import asyncio
import contextlib
import json

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from noria.reasons import Reason
from noria.v1 import chat_pb2
from tests.router.fakes import (
    EOS,
    KEY,
    FakeClock,
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


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer("wrong"),
        bearer(""),
        bearer("x" * 8000),
        (("authorization", f"Basic {KEY}"),),
        (("authorization", KEY),),
        (*bearer(), ("x-api-key", "another")),
        (*bearer(), *bearer("another")),
    ],
)
async def test_a_wrong_key_gets_one_and_the_same_answer_before_any_work(metadata):
    """SEC-01."""
    async with routed() as setup:
        for call in (
            setup.stub.StreamChat(chat_pb2.StreamChatRequest(spec=spec()), metadata=metadata),
            setup.stub.Chat(chat_pb2.ChatRequest(spec=spec()), metadata=metadata),
            setup.stub.CancelRequest(chat_pb2.CancelRequestRequest(), metadata=metadata),
        ):
            code, error = await failure(call)
            assert (code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, Reason.INVALID_KEY)
            assert error.message == "the API key is missing, unknown or malformed"
        assert not setup.tokenizer.encoded


@pytest.mark.parametrize(
    "metadata",
    [
        (("x-api-key", KEY),),
        (("authorization", f"bearer {KEY}"),),
        (*bearer(), ("x-api-key", KEY)),
    ],
)
async def test_the_key_may_come_in_either_header(metadata):
    async with routed() as setup:
        setup.worker.auto = [10]
        request = chat_pb2.ChatRequest(spec=spec())
        assert (await setup.stub.Chat(request, metadata=metadata)).choices


async def test_a_refusal_names_the_request_in_initial_and_trailing_metadata():
    """STR-06."""
    async with routed() as setup:
        call = setup.stream(temperature=3.0)
        code, error = await failure(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.fields == (("sampling.temperature", "3; at least 0 and at most 2"),)
        request_id = dict(await call.initial_metadata())["noria-request-id"]
        assert dict(await call.trailing_metadata())["noria-request-id"] == request_id
        assert not setup.tokenizer.encoded


async def test_a_full_queue_refuses_at_once_without_any_tokenizer_work():
    """RTR-08."""
    async with routed(max_queued_requests=2) as setup:
        setup.worker.say_load(running=4, waiting=1, free_blocks=0)
        await until(lambda: next(iter(setup.router.registry)).load.waiting == 1)
        calls = [setup.stream() for _ in range(2)]
        await until(lambda: setup.router.held()["queued_tokens"] == 4)
        code, error = await failure(setup.stream())
        assert (code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL)
        assert error.retry_after_s >= 1
        assert len(setup.tokenizer.encoded) == 2
        setup.worker.auto = [10]
        setup.worker.say_load()
        await asyncio.gather(*map(events, calls))


async def test_queued_requests_are_served_by_priority_then_arrival():
    async with routed(FakeWorker(max_num_seqs=1)) as setup:
        setup.worker.say_load(running=1, waiting=1)
        await until(lambda: next(iter(setup.router.registry)).load.waiting == 1)
        calls = []
        for waiting, (name, priority) in enumerate([("a", 0), ("b", 5), ("c", 5), ("d", 0)], 1):
            calls.append(setup.stream(name, priority=priority))
            await until(lambda n=waiting: setup.router.held()["queued_tokens"] == n)
        for number in range(1, 5):
            setup.worker.say_load()
            await setup.submitted(number)
            setup.worker.finish(number, "eos", EOS)
        await asyncio.gather(*map(events, calls))
        served = [chr(submit.prompt_token_ids[0]) for submit in setup.worker.submits]
        assert served == ["b", "c", "a", "d"]


async def test_a_deadline_that_passes_in_the_queue_is_a_plain_status():
    """GRP-08: no message_start, nothing submitted, nothing held; a server's deadline says its
    reason.
    """
    async with routed(default_deadline_s=0.2) as setup:
        setup.worker.say_load(running=4, waiting=1, free_blocks=0)
        await until(lambda: next(iter(setup.router.registry)).load.waiting == 1)
        code, error = await failure(setup.stream(timeout=None))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.reason is Reason.DEADLINE_EXCEEDED
        await setup.at_rest()
        assert not setup.worker.submits


async def test_a_slow_reader_gets_merged_text_and_loses_none():
    """While the client does not read, deltas merge; when it reads again, all text is there."""
    async with routed(tokenizer=big_pieces()) as setup:
        call = setup.stream()
        await setup.submitted(1)
        await block(setup)
        for token_id in range(10, 110):
            setup.worker.emit(1, token_id)
        setup.worker.finish(1, "eos", EOS)
        await until(lambda: setup.router.held()["decode_slots"] == 0)
        received = texts(await events(call))
        assert "".join(received).endswith("".join(f" {n}" for n in range(10, 110)))
        assert len(received) < 60


async def test_a_client_that_reads_nothing_for_thirty_seconds_is_ended():
    """STR-07: its worker, slot and permit come back although it never reads again."""
    clock = FakeClock()
    async with routed(tokenizer=big_pieces(), clock=clock) as setup:
        call = setup.stream()
        await setup.submitted(1)
        await block(setup)
        clock.now += 29
        await asyncio.sleep(0.05)
        assert setup.worker.aborts == []
        clock.now += 2
        await until(lambda: setup.worker.aborts == [1])
        await setup.at_rest()
        code, error = await failure(call)
        assert (code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.SLOW_READER)


async def test_a_client_that_leaves_a_mebibyte_unread_is_ended():
    """STR-07."""
    async with routed(tokenizer=big_pieces()) as setup:
        call = setup.stream()
        await setup.submitted(1)
        with contextlib.suppress(KeyError):
            for _ in range(40):
                setup.worker.emit(1, 1)
                await asyncio.sleep(0)
        await until(lambda: setup.worker.aborts == [1])
        assert (await failure(call))[1].reason is Reason.SLOW_READER


def big_pieces() -> FakeTokenizer:
    tokenizer = FakeTokenizer()
    tokenizer.pieces = {1: "x" * 60_000}
    return tokenizer


async def block(setup) -> None:
    """Send more than an unread stream's window holds, piece by piece as each is decoded."""
    for count in range(1, 9):
        setup.worker.emit(1, 1)
        await until(lambda n=count: [len(s.ids) for s in setup.tokenizer.slots.values()] == [n])


async def test_a_drain_lets_streams_finish_and_takes_nothing_new():
    async with routed() as setup:
        call = setup.stream()
        await setup.submitted(1)
        draining = asyncio.create_task(setup.router.drain(grace_s=10))
        await until(lambda: not setup.router._admission.is_open)
        code, error = await failure(setup.stream())
        assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.DRAINING)
        setup.worker.finish(1, "eos", EOS)
        assert (await events(call))[-1].HasField("message_stop")
        await draining


async def test_what_outlives_the_grace_period_ends_with_draining():
    async with routed() as setup:
        call = setup.stream()
        await setup.submitted(1)
        await next_event(call)
        await setup.router.drain(grace_s=0)
        assert (await failure(call))[1].reason is Reason.DRAINING


async def test_health_is_ready_only_with_tokenizer_and_worker_and_not_while_draining():
    async with (
        routed() as setup,
        grpc.aio.insecure_channel(setup.router.address) as channel,
    ):
        watching = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="noria.v1.ChatService")
        )

        async def becomes(status: int) -> None:
            async with asyncio.timeout(5):
                while (await watching.read()).status != status:
                    pass

        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        await becomes(serving)
        await setup.worker.stop()
        await becomes(not_serving)
        await setup.worker.start()
        await becomes(serving)
        await setup.tokenizer.stop()
        await becomes(not_serving)
        await setup.tokenizer.start()
        await becomes(serving)
        await setup.router.drain(grace_s=0)
        await becomes(not_serving)
        watching.cancel()


async def test_each_request_has_one_log_line_and_no_line_quotes_prompt_reply_or_key():
    with structlog.testing.capture_logs() as lines:
        async with routed() as setup:
            setup.tokenizer.pieces = {10: "REPLYMARK"}
            setup.worker.auto = [10]
            await events(setup.stream("PROMPTMARK"))
            await failure(setup.stream("PROMPTMARK", temperature=9))
            await failure(setup.stream("PROMPTMARK", key="KEYMARK"))
            setup.tokenizer.encode_error = ValueError("PROMPTMARK")
            await failure(setup.stream("PROMPTMARK"))
    requests = [line for line in lines if line["event"] == "request"]
    assert [line["outcome"] for line in requests] == [
        "SERVED",
        "INVALID_FIELD",
        "INVALID_KEY",
        "INTERNAL",
    ]
    served = requests[0]
    assert (served["input_tokens"], served["output_tokens"]) == (10, 2)
    assert served["total_ms"] >= served["first_delta_ms"] > 0
    told = json.dumps(lines)
    assert not [mark for mark in ("PROMPTMARK", "REPLYMARK", "KEYMARK", KEY) if mark in told]


async def test_a_defect_is_internal_logged_without_its_message_and_holds_nothing(monkeypatch):
    def broken(*_: object) -> None:
        raise ValueError("PROMPTMARK")

    with structlog.testing.capture_logs() as lines:
        async with routed() as setup:
            monkeypatch.setattr("router.chat.allowed_tokens", broken)
            code, error = await failure(setup.stream())
            assert (code, error.message) == (grpc.StatusCode.INTERNAL, "internal error")
            await setup.at_rest()
    assert [line["error"] for line in lines if line["event"] == "defect"] == ["ValueError"]
    assert "PROMPTMARK" not in json.dumps(lines)
