"""Every outcome has exactly one timeline, its phases add up, and all places tell the same one."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest
import structlog
from prometheus_client import generate_latest

from noria.reasons import Reason, RequestError
from noria.v1 import chat_pb2, common_pb2, worker_pb2
from router import wire_record
from router.record import RequestRecord
from router.wire_record import MAX_TIMELINE_BYTES, TIMELINE_KEY
from tests.router.fakes import (
    EOS,
    FakeClock,
    FakeTokenizer,
    FakeWorker,
    bearer,
    next_event,
    routed,
    spec,
    until,
)
from tests.support.scraping import Scrape

STATE = chat_pb2.RequestState


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def log():
    with structlog.testing.capture_logs() as lines:
        yield lines


async def pass_time(setup, clock, seconds):
    """Move the clock; the workers report anew, since what they said has aged."""
    clock.now += seconds
    for worker in setup.workers:
        if worker.instances:
            worker.say_load()
    await until(
        lambda: all(w.load is not None and w.load.received_at == clock.now
                    for w in setup.router.registry)
    )  # fmt: skip


async def ended(call):
    """Read a stream to its end: its status and its timeline, from its trailing metadata."""
    code, inside = grpc.StatusCode.OK, None
    try:
        async with asyncio.timeout(10):
            while (response := await call.read()) is not grpc.aio.EOF:
                if response.event.HasField("message_delta"):
                    inside = response.event.message_delta.timeline
        trailing = await call.trailing_metadata()
    except grpc.aio.AioRpcError as error:
        code, trailing = error.code(), error.trailing_metadata()
    raw = dict(trailing or ()).get(TIMELINE_KEY)
    if raw is None:
        return SimpleNamespace(code=code, timeline=None)
    assert len(raw) <= MAX_TIMELINE_BYTES
    timeline = common_pb2.Timeline.FromString(raw)
    assert inside is None or inside == timeline
    return SimpleNamespace(code=code, timeline=timeline)


async def record(setup, request_id):
    request = chat_pb2.GetRequestRequest(request_id=request_id)
    return await setup.stub.GetRequest(request, metadata=bearer())


async def request_id_of(call):
    return dict(await call.initial_metadata())["noria-request-id"]


def phases(timeline):
    """Milliseconds by phase."""
    return {
        common_pb2.PhaseKind.Name(phase.kind).removeprefix("PHASE_KIND_"): phase.duration_us / 1000
        for phase in timeline.phases
    }


async def test_a_served_request_shows_where_its_time_went(clock):
    """Each service's durations lie inside what the router measured; the rest is transport."""
    async with routed(clock=clock) as setup:
        setup.tokenizer.encode_us, setup.tokenizer.decode_us = 60_000, 30_000
        setup.tokenizer.encode_gate.clear()
        call = setup.stream(seed=-5)
        await until(lambda: setup.tokenizer.encoded)
        setup.worker.say_load(running=4, waiting=1, free_blocks=0)
        await until(lambda: next(iter(setup.router.registry)).load.waiting == 1)
        clock.now += 0.1
        setup.tokenizer.encode_gate.set()
        await until(lambda: setup.router.held()["queued_tokens"])
        await pass_time(setup, clock, 0.2)
        await setup.submitted(1)
        clock.now += 0.5
        setup.worker.emit(1, 10, cached=1, waiting_us=100_000, prefill_us=250_000)
        while not (await next_event(call)).HasField("content_block_delta"):
            pass
        clock.now += 1.0
        setup.tokenizer.decode_gate.clear()
        setup.worker.finish(1, "eos", 11, EOS, preemptions=2, decode_us=900_000)
        await until(lambda: setup.router.held()["attempts"] == 0)
        clock.now += 0.04
        setup.tokenizer.decode_gate.set()
        end = await ended(call)
        told = await record(setup, end.timeline.request_id)
    timeline = end.timeline
    assert phases(timeline) == {
        "ENCODE": 60, "QUEUE": 200, "BATCH_WAIT": 100, "PREFILL": 250, "DECODE": 900,
        "DETOKENIZE": 30, "TRANSPORT": 40 + 150 + 100 + 10,
    }  # fmt: skip
    assert timeline.total_us == 1_840_000
    assert timeline.first_delta_us == 800_000
    assert timeline.usage == common_pb2.Usage(input_tokens=2, cached_tokens=1, output_tokens=3)
    assert (timeline.wasted_tokens, timeline.attempts, timeline.preemptions) == (0, 1, 2)
    assert (timeline.seed, timeline.queue_position) == (-5, 0)
    assert timeline.worker_id == setup.worker.address
    assert "tokens in flight" in timeline.routing_note
    assert timeline.reason == common_pb2.REASON_UNSPECIFIED
    assert (told.state, told.timeline) == (STATE.REQUEST_STATE_SERVED, timeline)
    assert (told.model, told.stop_reason) == ("fake-model", chat_pb2.STOP_REASON_END_TURN)


async def test_a_unary_answer_carries_the_same_timeline_twice(clock):
    async with routed(clock=clock) as setup:
        setup.worker.auto = [10]
        call = setup.stub.Chat(chat_pb2.ChatRequest(spec=spec()), metadata=bearer())
        response = await call
        trailing = dict(await call.trailing_metadata())[TIMELINE_KEY]
        assert common_pb2.Timeline.FromString(trailing) == response.timeline
        assert response.timeline.usage == response.usage
        assert response.timeline.HasField("first_delta_us")


async def test_tokens_computed_after_a_stop_string_are_wasted_and_known_in_the_end(clock):
    """Those received are in the timeline at once, those still computed later in the record."""
    async with routed(clock=clock) as setup:
        setup.tokenizer.pieces = {10: "STOP"}
        setup.worker.acknowledge_aborts = False
        setup.tokenizer.decode_gate.clear()
        call = setup.stream(stop_sequences=["STOP"])
        await setup.submitted(1)
        setup.worker.emit(1, 10, waiting_us=0, prefill_us=300_000)
        setup.worker.emit(1, 11, 12)
        await until(lambda: setup.worker._counts.get(1) == 3)
        setup.worker.say_load()
        await pass_time(setup, clock, 0.1)
        setup.tokenizer.decode_gate.set()
        end = await ended(call)
        assert end.timeline.usage.output_tokens == 1
        assert end.timeline.wasted_tokens == 2
        assert end.timeline.total_us == 100_000
        await until(lambda: setup.worker.aborts == [1])
        setup.worker.finish(1, "aborted", more=4)
        await setup.at_rest()
        told = await record(setup, end.timeline.request_id)
        assert told.timeline.wasted_tokens == 6
        figures = Scrape(generate_latest(setup.router.metrics_registry).decode())
        assert figures["noria_wasted_tokens_total", "fake-model"] == 6
        assert told.timeline.phases == end.timeline.phases


async def test_a_request_on_its_way_shows_its_timeline_so_far(clock):
    async with routed(clock=clock) as setup:
        setup.worker.say_load(running=4, waiting=1, free_blocks=0)
        await until(lambda: next(iter(setup.router.registry)).load.waiting == 1)
        calls = [setup.stream()]
        await until(lambda: setup.router.held()["queued_tokens"] == 2)
        calls.append(setup.stream())
        await until(lambda: setup.router.held()["queued_tokens"] == 4)
        ids = [await request_id_of(call) for call in calls]
        clock.now += 0.25
        told = [await record(setup, request_id) for request_id in ids]
        assert {answer.state for answer in told} == {STATE.REQUEST_STATE_QUEUED}
        assert [answer.timeline.queue_position for answer in told] == [0, 1]
        assert [phases(answer.timeline) for answer in told] == [{"QUEUE": 250}] * 2
        await pass_time(setup, clock, 0.5)
        await setup.submitted(2)
        clock.now += 1
        told = await record(setup, ids[0])
        assert told.state == STATE.REQUEST_STATE_RUNNING
        assert phases(told.timeline) == {"QUEUE": 750, "BATCH_WAIT": 1000}
        assert told.timeline.total_us == 1_750_000
        for number in (1, 2):
            setup.worker.finish(number, "eos", EOS)
        await asyncio.gather(*map(ended, calls))


# Ways to end, each with the setup's own doing; what they return is read as a stream.


async def invalid(setup, clock):
    return setup.stream(temperature=9)


async def unknown_model(setup, clock):
    return setup.stream(model="nobody")


async def too_long(setup, clock):
    return setup.stream(max_tokens=999)


async def queue_full(setup, clock):
    setup.router._queue._max_requests = 0
    return setup.stream()


async def draining(setup, clock):
    setup.router._admission.is_open = False
    return setup.stream()


async def tokenizer_refuses(setup, clock):
    setup.tokenizer.encode_error = RequestError(Reason.UNSUPPORTED, "messages: no")
    return setup.stream()


async def no_tokenizer(setup, clock):
    await setup.tokenizer.stop()
    await until(lambda: not setup.router._tokenizers.is_up("fake-model"))
    return setup.stream()


async def no_worker(setup, clock):
    await setup.worker.stop()
    await until(lambda: not list(setup.router.registry))
    return setup.stream()


async def expired_in_the_queue(setup, clock):
    setup.router._servicer._calls._default_deadline_s = 0.05
    setup.worker.say_load(running=4, waiting=1, free_blocks=0)
    await until(lambda: next(iter(setup.router.registry)).load.waiting == 1)
    return setup.stream(timeout=None)


async def placed(setup, clock):
    call = setup.stream()
    await setup.submitted(1)
    clock.now += 0.5
    return call


async def mid_stream(setup, clock):
    call = await placed(setup, clock)
    setup.worker.emit(1, 10, 11, waiting_us=100_000, prefill_us=400_000)
    while not (await next_event(call)).HasField("content_block_delta"):
        pass
    clock.now += 0.25
    return call


async def refused_by_the_worker(setup, clock):
    call = await placed(setup, clock)
    setup.worker.refuse(1, worker_pb2.REFUSAL_CODE_INVALID, "no", "prompt_token_ids")
    return call


async def worker_failed(setup, clock):
    call = await placed(setup, clock)
    setup.worker.refuse(1, worker_pb2.REFUSAL_CODE_INTERNAL)
    return call


async def expired_at_the_worker(setup, clock):
    call = await placed(setup, clock)
    setup.worker.finish(1, "expired", waiting_us=500_000)
    return call


async def worker_lost(setup, clock):
    call = await mid_stream(setup, clock)
    setup.worker.break_session()
    return call


async def tokenizer_lost(setup, clock):
    call = await mid_stream(setup, clock)
    await setup.tokenizer.stop()
    return call


async def grace_over(setup, clock):
    call = await mid_stream(setup, clock)
    await setup.router.drain(grace_s=0)
    return call


def cancelled_at(moment):
    async def way(setup, clock):
        if moment == "encoding":
            setup.tokenizer.encode_gate.clear()
            call = setup.stream()
            await until(lambda: setup.tokenizer.encoded)
            clock.now += 0.125
        elif moment == "queued":
            setup.worker.say_load(running=4, waiting=1, free_blocks=0)
            await until(lambda: next(iter(setup.router.registry)).load.waiting == 1)
            call = setup.stream()
            await until(lambda: setup.router.held()["queued_tokens"])
            clock.now += 0.125
        else:
            call = await (placed if moment == "placed" else mid_stream)(setup, clock)
        request = chat_pb2.CancelRequestRequest(request_id=await request_id_of(call))
        await setup.stub.CancelRequest(request, metadata=bearer())
        return call

    return way


OUTCOMES = {
    "an invalid field": (invalid, "INVALID_FIELD", "REFUSED", {}),
    "an unknown model": (unknown_model, "MODEL_NOT_FOUND", "REFUSED", {}),
    "a full queue": (queue_full, "QUEUE_FULL", "REFUSED", {}),
    "a router that drains": (draining, "DRAINING", "REFUSED", {}),
    "a tokenizer that refuses": (tokenizer_refuses, "UNSUPPORTED", "REFUSED", {}),
    "a prompt that is too long": (too_long, "CONTEXT_LENGTH_EXCEEDED", "REFUSED", {}),
    "no tokenizer": (no_tokenizer, "NO_TOKENIZER", "REFUSED", {}),
    "no worker": (no_worker, "NO_WORKER", "REFUSED", {}),
    "a worker's refusal": (
        refused_by_the_worker, "INVALID_FIELD", "REFUSED", {"BATCH_WAIT": 500}),
    "expiry in the queue": (expired_in_the_queue, "DEADLINE_EXCEEDED", "EXPIRED", {}),
    "expiry at the worker": (
        expired_at_the_worker, "DEADLINE_EXCEEDED", "EXPIRED", {"BATCH_WAIT": 500}),
    "a worker's failure": (worker_failed, "INTERNAL", "FAILED", {"BATCH_WAIT": 500}),
    "a lost worker": (
        worker_lost, "WORKER_LOST", "FAILED",
        {"BATCH_WAIT": 100, "PREFILL": 400, "DECODE": 250}),
    "a lost tokenizer": (
        tokenizer_lost, "TOKENIZER_LOST", "FAILED",
        {"BATCH_WAIT": 100, "PREFILL": 400, "DECODE": 250}),
    "a drain's end": (
        grace_over, "DRAINING", "FAILED",
        {"BATCH_WAIT": 100, "PREFILL": 400, "DECODE": 250}),
    "a cancel while encoding": (
        cancelled_at("encoding"), "CANCELLED", "CANCELLED", {"ENCODE": 125}),
    "a cancel in the queue": (
        cancelled_at("queued"), "CANCELLED", "CANCELLED", {"QUEUE": 125}),
    "a cancel before the first token": (
        cancelled_at("placed"), "CANCELLED", "CANCELLED", {"BATCH_WAIT": 500}),
    "a cancel in mid-stream": (
        cancelled_at("mid-stream"), "CANCELLED", "CANCELLED",
        {"BATCH_WAIT": 100, "PREFILL": 400, "DECODE": 250}),
}  # fmt: skip


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_an_unserved_request_has_one_timeline_that_adds_up(outcome, clock, log):
    way, reason, state, expected = OUTCOMES[outcome]
    async with routed(clock=clock, tokenizer_patience_s=0.05) as setup:
        began = clock.now
        call = await way(setup, clock)
        end = await ended(call)
        wall_us = (clock.now - began) * 1e6
        timeline = end.timeline
        told = await record(setup, timeline.request_id)
        await setup.at_rest()
        setup.tokenizer.encode_gate.set()
    assert common_pb2.Reason.Name(timeline.reason) == f"REASON_{reason}"
    assert sum(phase.duration_us for phase in timeline.phases) == timeline.total_us
    assert abs(timeline.total_us - wall_us) <= 2000
    assert phases(timeline) == expected
    assert STATE.Name(told.state) == f"REQUEST_STATE_{state}"
    assert told.timeline.phases == timeline.phases
    lines = [line for line in log if line["event"] == "request"]
    assert [line["outcome"] for line in lines] == [reason]
    assert lines[0]["total_ms"] == timeline.total_us / 1000


async def test_what_a_lost_stream_has_cost_is_in_its_timeline(clock):
    """Usage counts what was sent, waste what was computed beyond it."""
    async with routed(clock=clock) as setup:
        call = await mid_stream(setup, clock)
        setup.tokenizer.decode_gate.clear()
        setup.worker.emit(1, 12, 13, 14)
        setup.worker.break_session()
        timeline = (await ended(call)).timeline
        assert timeline.usage == common_pb2.Usage(input_tokens=2, output_tokens=2)
        assert timeline.wasted_tokens == 3
        setup.tokenizer.decode_gate.set()


async def test_a_client_that_closes_its_stream_leaves_a_record(clock, log):
    async with routed(clock=clock) as setup:
        call = await mid_stream(setup, clock)
        request_id = await request_id_of(call)
        setup.worker.acknowledge_aborts = False
        call.cancel()
        await until(lambda: setup.worker.aborts == [1])
        setup.worker.finish(1, "aborted", more=3)
        await setup.at_rest()
        told = await record(setup, request_id)
    assert told.state == STATE.REQUEST_STATE_CANCELLED
    assert told.timeline.reason == common_pb2.REASON_CANCELLED
    assert phases(told.timeline) == {"BATCH_WAIT": 100, "PREFILL": 400, "DECODE": 250}
    assert told.timeline.wasted_tokens == 3
    assert [line["outcome"] for line in log if line["event"] == "request"] == ["CANCELLED"]


async def test_a_slow_readers_timeline_ends_in_delivery(clock):
    """All text is there, the client reads none of it: that is delivery, not decoding."""
    tokenizer = FakeTokenizer()
    tokenizer.pieces = {1: "x" * 60_000}
    async with routed(clock=clock, tokenizer=tokenizer) as setup:
        call = setup.stream()
        await setup.submitted(1)
        for count in range(1, 9):
            setup.worker.emit(1, 1, waiting_us=0, prefill_us=0)
            await until(lambda n=count: [len(s.ids) for s in tokenizer.slots.values()] == [n])
        setup.worker.finish(1, "eos", EOS)
        await until(lambda: setup.router.held()["decode_slots"] == 0)
        clock.now += 31
        await until(lambda: not setup.router.held()["requests"])
        timeline = (await ended(call)).timeline
    assert timeline.reason == common_pb2.REASON_SLOW_READER
    assert phases(timeline) == {"DELIVERY": 31_000}
    assert timeline.usage.output_tokens == 9


async def test_a_request_placed_twice_counts_both_waits(clock):
    async with routed(FakeWorker(), FakeWorker(), clock=clock) as setup:
        call = setup.stream()
        lost, other = await setup.holder()
        clock.now += 0.5
        other.say_load(running=4, waiting=1)
        await until(lambda: any(w.load.waiting for w in setup.router.registry))
        lost.break_session()
        await until(lambda: setup.router.held()["permits"] == 1)
        clock.now += 0.25
        other.say_load()
        await until(lambda: other.submits)
        other.finish(1, "eos", EOS, waiting_us=0, prefill_us=0)
        timeline = (await ended(call)).timeline
    assert phases(timeline) == {"BATCH_WAIT": 500, "QUEUE": 250}
    assert (timeline.attempts, timeline.worker_id) == (2, other.address)


async def test_without_a_known_key_there_is_a_line_and_no_timeline(clock, log):
    async with routed(clock=clock) as setup:
        end = await ended(setup.stream(key="wrong"))
    assert (end.code, end.timeline) == (grpc.StatusCode.UNAUTHENTICATED, None)
    assert [line["outcome"] for line in log if line["event"] == "request"] == ["INVALID_KEY"]


def test_what_is_heard_after_the_end_changes_the_record_but_nothing_that_was_told():
    record = RequestRecord("req-1", lambda: 5.0, tenant="t")
    record.wasted(2)
    record.close()
    told = wire_record.timeline(record)
    record.wasted(3)
    assert wire_record.timeline(record) == told
    assert told.wasted_tokens == 2
    assert record.fields()["wasted_tokens"] == 2
    assert wire_record.request(record).timeline.wasted_tokens == 5


async def test_a_prefill_that_never_reached_a_token_is_booked_as_one(clock):
    """Cancelled, or lost with its worker: the worker had told when it began."""
    async with routed(clock=clock) as setup:
        calls = [setup.stream(), setup.stream()]
        ids = [await request_id_of(call) for call in calls]
        await setup.submitted(2)
        clock.now += 0.3
        for number in (1, 2):
            setup.worker.emit(number, waiting_us=200_000)
        await pass_time(setup, clock, 0)
        clock.now += 0.5
        calls[0].cancel()
        await until(lambda: setup.worker.aborts)
        setup.worker.break_session()
        await until(lambda: setup.router.held()["permits"] == 1)
        calls[1].cancel()
        await setup.at_rest()
        told = [(await record(setup, request_id)).timeline for request_id in ids]
    for timeline in told:
        assert phases(timeline) == {"BATCH_WAIT": 200, "TRANSPORT": 100, "PREFILL": 500}


async def test_the_first_token_ends_a_prefill_that_was_told_before(clock):
    async with routed(clock=clock) as setup:
        call = setup.stream()
        await setup.submitted(1)
        clock.now += 0.3
        setup.worker.emit(1, waiting_us=200_000)
        await pass_time(setup, clock, 0)
        await pass_time(setup, clock, 0.5)
        setup.worker.emit(1, 10, waiting_us=200_000, prefill_us=450_000)
        await until(lambda: next(iter(setup.router.registry)).attempts[1].delivered == 1)
        await pass_time(setup, clock, 1.0)
        setup.worker.finish(1, "eos", EOS, decode_us=1_000_000)
        timeline = (await ended(call)).timeline
    expected = {"BATCH_WAIT": 200, "TRANSPORT": 150, "PREFILL": 450, "DECODE": 1000}
    assert phases(timeline) == expected


async def test_a_request_that_expires_in_its_prefill_shows_it(clock):
    async with routed(clock=clock) as setup:
        call = setup.stream()
        await setup.submitted(1)
        clock.now += 0.3
        setup.worker.emit(1, waiting_us=300_000)
        await pass_time(setup, clock, 0)
        await pass_time(setup, clock, 0.5)
        setup.worker.finish(1, "expired", waiting_us=300_000, prefill_us=500_000)
        timeline = (await ended(call)).timeline
    assert timeline.reason == common_pb2.REASON_DEADLINE_EXCEEDED
    assert phases(timeline) == {"BATCH_WAIT": 300, "PREFILL": 500}
