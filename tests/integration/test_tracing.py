"""Each request is one unbroken trace, whose spans equal its timeline, whatever becomes of it."""

import asyncio
import contextlib
import signal

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from noria.v1 import chat_pb2, chat_pb2_grpc, common_pb2
from router import span_export
from tests.support.canary import API_KEY, look
from tests.support.processes import worker_fleet
from tests.support.stack import running_stack
from tests.support.waiting import until
from tokenizer_svc.servicer import TokenizerServicer
from worker import session_hub

KEY = ("authorization", f"Bearer {API_KEY}")
COLLECTOR = {"otlp_endpoint": "http://collector.invalid:4318"}
OUTCOMES = {
    "served": "SERVED",
    "refused": "CONTEXT_LENGTH_EXCEEDED",
    "cancelled": "CANCELLED",
    "failed": "WORKER_LOST",
}


@pytest.fixture
def spans(monkeypatch):
    """What a collector would get."""
    memory = InMemorySpanExporter()
    monkeypatch.setattr(span_export, "otlp_exporter", lambda endpoint: memory)
    return memory


def caller(number, flags="01"):
    return f"00-{number:032x}-{number:016x}-{flags}"


def ask(stub, number, *, max_tokens):
    block = chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text="a"))
    message = chat_pb2.Message(role=chat_pb2.ROLE_USER, content=[block])
    spec = chat_pb2.ChatSpec(messages=[message], max_tokens=max_tokens)
    metadata = (KEY, ("traceparent", caller(number)), ("tracestate", "shop=1"))
    return stub.StreamChat(chat_pb2.StreamChatRequest(spec=spec), metadata=metadata)


async def read(call):
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for _ in call:
            pass


async def first_text(call):
    async for response in call:
        if response.event.HasField("content_block_delta"):
            return


async def test_every_outcome_is_one_trace_whose_spans_equal_the_timeline(
    spans, golden_model, script_file
):
    script = script_file(mean_output_tokens=0, step_seconds=0.005, token_ids=[32, 127])
    async with (
        worker_fleet(golden_model, script, num_workers=1, router=COLLECTOR) as (fleet, router, _),
        grpc.aio.insecure_channel(router.address) as channel,
    ):
        stub = chat_pb2_grpc.ChatServiceStub(channel)
        calls = {
            "served": ask(stub, 1, max_tokens=4),
            "refused": ask(stub, 2, max_tokens=1_000_000),
            "cancelled": ask(stub, 3, max_tokens=1000),
        }
        await first_text(calls["cancelled"])
        calls["cancelled"].cancel()
        await asyncio.gather(*map(read, calls.values()))
        calls["failed"] = ask(stub, 4, max_tokens=1000)
        await first_text(calls["failed"])
        fleet.children["worker 0"].process.send_signal(signal.SIGKILL)
        await read(calls["failed"])
        await until(lambda: not router.held()["requests"])
        router._tracing.flush()
        finished = spans.get_finished_spans()
        look("spans", "".join(span.to_json() for span in finished))
        for number, name in enumerate(OUTCOMES, 1):
            request_id = dict(await calls[name].initial_metadata())["noria-request-id"]
            lookup = chat_pb2.GetRequestRequest(request_id=request_id)
            told = (await stub.GetRequest(lookup, metadata=(KEY,))).timeline
            check(name, number, told, [s for s in finished if s.context.trace_id == number])
        assert len({span.context.trace_id for span in finished}) == len(OUTCOMES)


def check(name, number, timeline, spans):
    """The spans of one trace against the timeline that GetRequest tells."""
    (root,) = [span for span in spans if span.parent.span_id == number]
    assert root.attributes["noria.outcome"] == OUTCOMES[name]
    assert root.attributes["noria.request_id"] == timeline.request_id
    assert root.attributes["gen_ai.usage.output_tokens"] == timeline.usage.output_tokens
    assert root.start_time == timeline.accepted_unix_us * 1000
    assert root.end_time - root.start_time == timeline.total_us * 1000
    assert root.status.is_ok is (name != "failed")
    children = [span for span in spans if span is not root]
    assert {span.parent.span_id for span in children} == {root.context.span_id}
    assert [(span.name, span.end_time - span.start_time) for span in children] == [
        (phase_name(phase.kind), phase.duration_us * 1000) for phase in timeline.phases
    ]


def phase_name(kind):
    return common_pb2.PhaseKind.Name(kind).removeprefix("PHASE_KIND_").lower()


@pytest.mark.parametrize("flags", ["00", "01"])
@pytest.mark.parametrize("collector", [{}, COLLECTOR])
async def test_tokenizer_and_worker_get_the_trace(
    spans, golden_model, script_file, monkeypatch, collector, flags
):
    """With a collector they see the router's span as their parent, else the caller's context."""
    seen = {}
    encode, sequence_from = TokenizerServicer.EncodeChat, session_hub.sequence_from

    async def encoding(self, request, context):
        seen["tokenizer"] = dict(context.invocation_metadata())["traceparent"]
        return await encode(self, request, context)

    def submitted(submit, *more):
        seen["worker"] = submit.traceparent
        return sequence_from(submit, *more)

    monkeypatch.setattr(TokenizerServicer, "EncodeChat", encoding)
    monkeypatch.setattr(session_hub, "sequence_from", submitted)
    script = script_file(mean_output_tokens=4, token_ids=[32, 127])
    async with running_stack(golden_model, script=script, router=collector) as running:
        await running.client.chat("a", max_tokens=4, traceparent=caller(7, flags))
        if collector:
            running.router._tracing.flush()
    assert seen["tokenizer"] == seen["worker"]
    roots = [span for span in spans.get_finished_spans() if span.parent.span_id == 7]
    if not collector:
        assert seen["worker"] == caller(7, flags)
    elif flags == "01":
        assert seen["worker"] == f"00-{7:032x}-{roots[0].context.span_id:016x}-01"
    else:
        assert not roots
        assert seen["worker"].startswith(f"00-{7:032x}-")
        assert seen["worker"].endswith("-00")
