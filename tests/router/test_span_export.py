"""Spans equal the timeline; a collector that is slow, broken or away harms nobody."""

import asyncio
import http.server
import sys
import threading
import time
from collections import Counter

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status as OtlpStatus
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import router
from noria.reasons import Reason
from noria.service.trace import TraceContext, new_trace, parse_traceparent
from router import span_export
from router.config import RouterConfig
from router.record import RequestRecord
from router.span_export import SpanExport
from router.spans import request_spans
from router.timeline import Phase
from router.tracing import TracingMissingError, new_tracing
from tests.router.fakes import FakeClock

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"


def ended(trace=None, *, clock=None, moves=(), reason=None, tenant="t", **fields):
    """A record whose timeline went through these phases, so many microseconds each."""
    clock = clock or FakeClock()
    record = RequestRecord(
        "req-1", clock, 1_700_000_000_000_000, method="Chat", tenant=tenant,
        trace=trace or new_trace(is_sampled=True), **fields,
    )  # fmt: skip
    for phase, us in moves:
        record.timeline.enter(phase)
        clock.now += us / 1e6
    record.close(reason)
    return record


@given(st.lists(st.tuples(st.sampled_from(Phase), st.integers(0, 10**9)), max_size=12))
def test_the_phases_fill_the_requests_span_one_after_the_other(moves):
    record = ended(moves=moves)
    root, *phases = request_spans(record)
    total_us, told = record.timeline.read()
    assert root.end_ns - root.start_ns == total_us * 1000
    assert [(span.name, span.end_ns - span.start_ns) for span in phases] == [
        (phase.name.lower(), us * 1000) for phase, us in told
    ]
    borders = [root.start_ns, *(span.end_ns for span in phases)]
    assert [span.start_ns for span in phases] == borders[:-1]
    assert borders[-1] == root.end_ns
    assert {span.parent_id for span in phases} <= {root.span_id}
    assert len({root.span_id, *(span.span_id for span in phases)}) == 1 + len(phases)


@pytest.mark.parametrize(
    ("reason", "is_error"),
    [(None, False), (Reason.QUEUE_FULL, False), (Reason.CANCELLED, False), (Reason.INTERNAL, True)],
)
def test_a_span_tells_the_outcome_and_is_an_error_if_the_request_failed(reason, is_error):
    root, *_ = request_spans(ended(reason=reason, model="m", worker_id="w"))
    assert root.is_error is is_error
    assert root.attributes["noria.outcome"] == (reason or "SERVED")
    assert root.attributes["gen_ai.request.model"] == "m"


class Harness:
    def __init__(self, exporter, sample_ratio=1.0):
        self.counts = Counter()
        self.export = SpanExport(
            exporter, sample_ratio=sample_ratio, instance_id="r", log=structlog.get_logger(),
            count=lambda outcome, count: self.counts.update({outcome: count}),
        )  # fmt: skip


async def test_a_sampled_callers_request_is_exported_below_the_callers_span():
    memory = InMemorySpanExporter()
    harness = Harness(memory)
    metadata = [("traceparent", f"{CALLER}-01"), ("tracestate", "a=1,b=2")]
    async with harness.export.running():
        record = ended(harness.export.begin(metadata), moves=[(Phase.QUEUE, 5)])
        harness.export.on_end(record)
        harness.export.flush()
        root, phase = memory.get_finished_spans()
    assert f"{root.context.trace_id:032x}-{root.parent.span_id:016x}" == CALLER[3:]
    assert root.parent.is_remote
    assert phase.parent.span_id == root.context.span_id == int(record.trace.span_id, 16)
    assert phase.context.trace_id == root.context.trace_id
    assert root.context.trace_state.to_header() == "a=1,b=2"
    assert root.resource.attributes["service.name"] == "noria-router"
    assert harness.counts == {"exported": 2}


@pytest.mark.parametrize(
    ("metadata", "ratio", "tenant"),
    [
        ([("traceparent", f"{CALLER}-00")], 1.0, "t"),
        ([], 0.0, "t"),
        ([("traceparent", f"{CALLER}-01")], 1.0, ""),
    ],
)
async def test_what_is_not_sampled_and_what_strangers_ask_is_not_exported(metadata, ratio, tenant):
    harness = Harness(InMemorySpanExporter(), ratio)
    async with harness.export.running():
        harness.export.on_end(ended(harness.export.begin(metadata), tenant=tenant))
        harness.export.flush()
    assert not harness.counts


def test_of_traces_that_begin_here_the_given_part_is_sampled():
    begin = Harness(InMemorySpanExporter(), 0.25).export.begin
    sampled = sum(begin([]).is_sampled for _ in range(2000))
    assert 350 < sampled < 650


class Stuck(SpanExporter):
    """Takes spans and does not come back until it is let go."""

    def __init__(self):
        self.let_go = threading.Event()
        self.begun = threading.Event()

    def export(self, spans):
        self.begun.set()
        self.let_go.wait(20)
        return SpanExportResult.SUCCESS

    def shutdown(self):
        self.let_go.set()


async def test_what_waits_for_a_stuck_collector_is_bounded_and_no_request_waits(monkeypatch):
    monkeypatch.setattr(span_export, "MAX_QUEUED_SPANS", 600)
    stuck, clock = Stuck(), FakeClock()
    harness = Harness(stuck)
    async with harness.export.running():
        began = time.monotonic()
        for _ in range(1000):
            harness.export.on_end(ended(clock=clock, moves=[(Phase.QUEUE, 5)]))
        assert time.monotonic() - began < 2
        await asyncio.to_thread(stuck.begun.wait, 10)
        waiting = len(harness.export._processor._batch_processor._queue)
        assert waiting + harness.export._exporter.taken + harness.counts["dropped"] == 2000
        assert waiting <= 600
        stuck.let_go.set()
    assert harness.counts["exported"] + harness.counts["dropped"] == 2000


class Broken(SpanExporter):
    def __init__(self):
        self.results = [RuntimeError("MARK"), SpanExportResult.FAILURE, SpanExportResult.SUCCESS]

    def export(self, spans):
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def shutdown(self):
        pass


async def test_a_failing_collector_is_told_of_when_it_begins_and_ends():
    with structlog.testing.capture_logs() as lines:
        harness = Harness(Broken())
        async with harness.export.running():
            for _ in range(3):
                harness.export.on_end(ended())
                harness.export.flush()
    assert [line["event"] for line in lines] == ["trace_export_failed", "trace_export_works"]
    assert lines[0]["kind"] == "RuntimeError"
    assert harness.counts == {"failed": 2, "exported": 1}


async def test_a_collector_that_is_not_there_delays_a_stop_by_seconds_at_most(monkeypatch):
    monkeypatch.setattr(span_export, "EXPORT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(span_export, "_STOP_S", 0.3)
    harness = Harness(span_export.otlp_exporter("http://127.0.0.1:9"))
    began = time.monotonic()
    async with harness.export.running():
        for _ in range(1000):
            harness.export.on_end(ended(moves=[(Phase.QUEUE, 5)]))
    assert time.monotonic() - began < 5
    assert harness.counts["failed"] == 2000


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an OTLP exporter posts."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


async def test_a_collector_gets_the_spans_as_otlp_over_http():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.got = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}/"
        harness = Harness(span_export.otlp_exporter(endpoint))
        metadata = [("traceparent", f"{CALLER}-01"), ("tracestate", "a=1")]
        async with harness.export.running():
            begun = [harness.export.begin(metadata), harness.export.begin([])]
            for trace in begun:
                moves = [(Phase.QUEUE, 5), (Phase.DECODE, 7)]
                harness.export.on_end(ended(trace, moves=moves, reason=Reason.INTERNAL))
        server.shutdown()
    ((path, request),) = server.got
    assert path == "/v1/traces"
    (resource,) = request.resource_spans
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("noria-router", "r")
    spans = list(resource.scope_spans[0].spans)
    assert sorted(span.name for span in spans) == ["Chat"] * 2 + ["decode"] * 2 + ["queue"] * 2
    roots = [span for span in spans if span.name == "Chat"]
    below = next(span for span in roots if span.parent_span_id)
    assert f"{below.trace_id.hex()}-{below.parent_span_id.hex()}" == CALLER[3:]
    assert below.trace_state == "a=1"
    assert below.status.code == OtlpStatus.STATUS_CODE_ERROR
    assert below.kind == OtlpSpan.SPAN_KIND_SERVER
    assert harness.counts == {"exported": 6}


def test_a_context_of_zeros_is_no_trace():
    assert parse_traceparent(RequestRecord("", FakeClock()).trace.traceparent) is None
    assert isinstance(RequestRecord("", FakeClock()).trace, TraceContext)


def config(**settings):
    return RouterConfig(("a:1",), ("b:1",), api_key_sha256="0" * 64, **settings)


def test_a_collector_without_its_packages_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "router.span_export", None)
    monkeypatch.delattr(router, "span_export")
    with pytest.raises(TracingMissingError, match=r"otlp-endpoint: .*noria\[otel\]"):
        new_tracing(config(otlp_endpoint="http://c:4318"), "r", print, structlog.get_logger())
    assert new_tracing(config(), "r", print, structlog.get_logger())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"otlp_endpoint": "collector:4318"}, "otlp-endpoint: http://HOST:PORT"),
        ({"otlp_sample_ratio": 1.5}, "otlp-sample-ratio: 1.5; from 0 to 1"),
        ({"otlp_sample_ratio": float("nan")}, "otlp-sample-ratio: nan"),
    ],
)
def test_settings_out_of_range_are_named(settings, says):
    with pytest.raises(ValueError, match=says):
        config(**settings)
