"""GetRequest, ListModels, CountTokens, EstimateChat: what is told without generating."""

import grpc
import pytest

from noria.reasons import Reason, RequestError
from noria.v1 import chat_pb2, common_pb2
from router.auth import Tenant
from router.delivery import Delivery
from router.ended import REMEMBERED, REMEMBERED_S
from router.interrupt import Interrupt
from router.live import LiveRequest, LiveRequests
from router.record import RequestRecord
from router.timeline import Phase
from router.wire_record import MAX_TIMELINE_BYTES, timeline
from tests.router.fakes import (
    EOS,
    FakeClock,
    FakeWorker,
    bearer,
    events,
    failure,
    routed,
    spec,
    until,
)


def end_one(live: LiveRequests, clock, request_id: str, tenant: str) -> None:
    record = RequestRecord(request_id, clock)
    with live.hold(LiveRequest(Tenant(tenant), Interrupt(), Delivery(clock), record)):
        record.close()


async def test_records_are_kept_for_their_tenant_alone():
    clock = FakeClock()
    live = LiveRequests(clock)
    end_one(live, clock, "a", "mine")
    assert live.record("a", "mine").request_id == "a"
    messages = set()
    for request_id, tenant in (("a", "other"), ("b", "mine")):
        with pytest.raises(RequestError) as caught:
            live.record(request_id, tenant)
        assert caught.value.reason is Reason.REQUEST_NOT_FOUND
        messages.add(caught.value.message)
    assert len(messages) == 1


async def test_records_are_bounded_in_number_and_time():
    clock = FakeClock()
    live = LiveRequests(clock)
    for number in range(REMEMBERED + 1):
        end_one(live, clock, str(number), "mine")
    with pytest.raises(RequestError):
        live.record("0", "mine")
    clock.now += REMEMBERED_S
    assert live.record("1", "mine")
    clock.now += 1
    with pytest.raises(RequestError):
        live.record("1", "mine")


async def test_a_tenant_that_asks_much_pushes_out_its_own_records_alone():
    clock = FakeClock()
    live = LiveRequests(clock)
    for number in range(3):
        end_one(live, clock, f"quiet {number}", "quiet")
    for number in range(2 * REMEMBERED):
        end_one(live, clock, f"loud {number}", "loud")
    end_one(live, clock, "quiet 3", "quiet")
    for number in range(4):
        assert live.record(f"quiet {number}", "quiet")
    assert live.record(f"loud {REMEMBERED + 4}", "loud")
    with pytest.raises(RequestError):
        live.record(f"loud {REMEMBERED + 3}", "loud")


async def test_an_unknown_id_and_a_huge_one_are_refused():
    async with routed() as setup:
        request = chat_pb2.GetRequestRequest(request_id="req-unknown")
        code, error = await failure(setup.stub.GetRequest(request, metadata=bearer()))
        assert (code, error.reason) == (grpc.StatusCode.NOT_FOUND, Reason.REQUEST_NOT_FOUND)
        request = chat_pb2.GetRequestRequest(request_id="x" * 129)
        code, error = await failure(setup.stub.GetRequest(request, metadata=bearer()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        code, _ = await failure(setup.stub.GetRequest(request, metadata=bearer("wrong")))
        assert code is grpc.StatusCode.UNAUTHENTICATED


def test_the_largest_timeline_stays_within_its_bound():
    """All numbers at their largest, all names at theirs and of wide characters."""
    clock = FakeClock()
    record = RequestRecord("r" * 128, clock, accepted_unix_us=2**64 - 1)
    record.worker_id = record.routing_note = "과" * 5000
    record.attempts = record.preemptions = record.queue_position = 2**32 - 1
    record.input_tokens = record.cached_tokens = record.output_tokens = 2**32 - 1
    record.seed, record.first_delta_us = -(2**63), 2**64 - 1
    record.wasted(2**40)
    for phase in Phase:
        record.timeline.enter(phase)
        clock.now += 1e10
    record.close(Reason.INTERNAL)
    told = timeline(record)
    assert len(told.phases) == 9
    assert len(told.SerializeToString()) <= MAX_TIMELINE_BYTES


async def test_the_models_that_are_served_with_their_workers():
    first = FakeWorker(model="small", aliases=["default", "s"], default_max_tokens=64)
    second = FakeWorker(model="small", aliases=["s"], max_model_len=500)
    async with routed(first, second, FakeWorker(model="alien", vocab_fingerprint="x")) as setup:
        response = await setup.stub.ListModels(chat_pb2.ListModelsRequest(), metadata=bearer())
        (model,) = response.models
        assert (model.name, list(model.aliases)) == ("small", ["default", "s"])
        assert (model.max_model_len, model.workers) == (500, 2)


async def test_the_count_equals_what_is_charged_and_what_the_worker_sees():
    async with routed() as setup:
        for text in ("hi", "x" * 300, "토마토는 과일이야?"):
            request = chat_pb2.CountTokensRequest(spec=spec(text))
            count = (await setup.stub.CountTokens(request, metadata=bearer())).input_tokens
            setup.worker.auto = []
            answer = await events(setup.stream(text))
            (delta,) = [e.message_delta for e in answer if e.HasField("message_delta")]
            seen = len(setup.worker.submits[-1].prompt_token_ids)
            assert count == delta.usage.input_tokens == seen == len(text)


async def test_counting_checks_like_a_chat_and_holds_nothing():
    async with routed(max_queued_requests=1) as setup:
        bad = chat_pb2.CountTokensRequest(spec=spec(model="nobody"))
        code, error = await failure(setup.stub.CountTokens(bad, metadata=bearer()))
        assert (code, error.reason) == (grpc.StatusCode.NOT_FOUND, Reason.MODEL_NOT_FOUND)
        assert not setup.tokenizer.encoded
        setup.tokenizer.encode_gate.clear()
        request = chat_pb2.CountTokensRequest(spec=spec())
        counting = setup.stub.CountTokens(request, metadata=bearer())
        await until(lambda: setup.router.held()["permits"] == 1)
        code, error = await failure(setup.stub.CountTokens(request, metadata=bearer()))
        assert error.reason is Reason.QUEUE_FULL
        counting.cancel()
        await setup.at_rest()
        setup.tokenizer.encode_gate.set()


async def estimated(setup, text="hi", **fields):
    request = chat_pb2.EstimateChatRequest(spec=spec(text, **fields))
    return await setup.stub.EstimateChat(request, metadata=bearer())


async def test_an_estimate_names_price_blocks_place_and_worker():
    """17 prompt tokens and 30 more are 47 tokens, 3 blocks of 16."""
    async with routed() as setup:
        told = await estimated(setup, "x" * 17, max_tokens=30)
        assert (told.input_tokens, told.max_tokens, told.reserved_tokens) == (17, 30, 47)
        assert (told.kv_blocks, told.queue_position) == (3, 0)
        assert told.worker_id == setup.worker.address
        assert "tokens in flight" in told.routing_note
        assert told.refusal == common_pb2.REASON_UNSPECIFIED
        assert not any(setup.router.held().values())
        assert not setup.worker.submits


async def test_an_estimate_agrees_with_what_then_happens():
    async with routed(FakeWorker(), FakeWorker()) as setup:
        first = setup.stream(max_tokens=100)
        busy, idle = await setup.holder()
        told = await estimated(setup)
        assert told.worker_id == idle.address
        second = setup.stream(max_tokens=told.max_tokens)
        await until(lambda: idle.submits)
        assert idle.submits[0].max_tokens == told.max_tokens
        for worker in (busy, idle):
            worker.finish(1, "eos", EOS)
        await events(first)
        answer = await events(second)
        (end,) = [e.message_delta.timeline for e in answer if e.HasField("message_delta")]
        assert (end.worker_id, end.routing_note) == (told.worker_id, told.routing_note)


async def test_an_estimate_counts_who_waits_in_front():
    async with routed() as setup:
        setup.worker.say_load(running=4, waiting=1, free_blocks=0)
        await until(lambda: next(iter(setup.router.registry)).load.waiting == 1)
        calls = [setup.stream(), setup.stream(priority=5)]
        await until(lambda: setup.router.held()["queued_tokens"] == 4)
        told = [await estimated(setup, priority=priority) for priority in (0, 5, 6)]
        assert [answer.queue_position for answer in told] == [2, 1, 0]
        assert {answer.worker_id for answer in told} == {""}
        for call in calls:
            call.cancel()


@pytest.mark.parametrize(
    ("fields", "refusal", "input_tokens"),
    [
        ({"temperature": 9}, "INVALID_FIELD", 0),
        ({"model": "nobody"}, "MODEL_NOT_FOUND", 0),
        ({"max_tokens": 999}, "CONTEXT_LENGTH_EXCEEDED", 2),
        ({"min_tokens": 999}, "INVALID_FIELD", 2),
    ],
)
async def test_an_estimate_says_why_a_request_would_be_refused(fields, refusal, input_tokens):
    async with routed() as setup:
        told = await estimated(setup, **fields)
        assert common_pb2.Reason.Name(told.refusal) == f"REASON_{refusal}"
        assert told.refusal_message
        assert (told.input_tokens, told.worker_id) == (input_tokens, "")


async def test_an_estimate_of_a_drain_or_a_full_queue():
    """Draining refuses the call itself; a full queue is what a request would meet."""
    async with routed() as setup:
        setup.router._queue._max_requests = 0
        told = await estimated(setup)
        assert told.refusal == common_pb2.REASON_QUEUE_FULL
        setup.router._admission.is_open = False
        request = chat_pb2.EstimateChatRequest(spec=spec())
        _, error = await failure(setup.stub.EstimateChat(request, metadata=bearer()))
        assert error.reason is Reason.DRAINING


async def test_a_trace_context_reaches_tokenizer_and_worker_and_the_log_line():
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with routed() as setup:
        setup.worker.auto = []
        metadata = (*bearer(), ("traceparent", traceparent))
        await setup.stub.Chat(chat_pb2.ChatRequest(spec=spec()), metadata=metadata)
        assert setup.tokenizer.traceparents == [traceparent]
        assert [submit.traceparent for submit in setup.worker.submits] == [traceparent]
        await events(setup.stream())
        assert len(set(setup.tokenizer.traceparents)) == 2
        assert setup.tokenizer.traceparents[1] == setup.worker.submits[1].traceparent
