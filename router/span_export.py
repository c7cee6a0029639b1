"""Sends requests' spans to an OpenTelemetry collector, on a thread of its own.

What waits there is bounded: beyond it spans are dropped and counted. Nothing that goes wrong
with the collector reaches a request.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from noria.service.trace import Metadata, TraceContext, caller_trace, new_trace
from router.record import RequestRecord
from router.spans import Span, request_spans

MAX_QUEUED_SPANS = 8192
_BATCH = 512
_DELAY_MS = 1000.0
# Of one batch's export, tries again included; a stop takes no longer than a few of them.
EXPORT_TIMEOUT_S = 3.0
_STOP_S = 3.0
_SCOPE = InstrumentationScope("noria")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET, _FAILED = Status(StatusCode.UNSET), Status(StatusCode.ERROR)

# "exported", "failed" or "dropped", and how many; called on any thread.
Count = Callable[[str, int], None]


class SpanExport:
    """Begins requests' traces and exports those that are sampled.

    A caller's trace is sampled if the caller says so; of those that begin here `sample_ratio`
    are, chosen by trace id.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        sample_ratio: float,
        instance_id: str,
        count: Count,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._sample_ratio = sample_ratio
        self._count = count
        self._resource = Resource.create(
            {"service.name": "noria-router", "service.instance.id": instance_id}
        )
        self._exporter = _Counted(exporter, count, log)
        self._emitted = 0
        self._processor = BatchSpanProcessor(
            self._exporter, MAX_QUEUED_SPANS, _DELAY_MS, _BATCH, EXPORT_TIMEOUT_S * 1000
        )

    def begin(self, metadata: Metadata) -> TraceContext:
        """The request's own span, below its caller's if there is one."""
        caller = caller_trace(metadata)
        if caller is not None:
            return caller.child()
        made = new_trace(is_sampled=True)
        is_chosen = int(made.trace_id[16:], 16) < self._sample_ratio * 2**64
        return made if is_chosen else new_trace()

    def on_end(self, record: RequestRecord) -> None:
        """Export a request that has ended, if its trace is sampled; it never waits.

        Strangers, whose key is not known, have no record and no spans.
        """
        if not (record.trace.is_sampled and record.tenant):
            return
        spans = self._readable(record)
        if self._emitted - self._exporter.taken + len(spans) > MAX_QUEUED_SPANS:
            self._count("dropped", len(spans))
            return
        self._emitted += len(spans)
        for span in spans:
            self._processor.on_end(span)

    def flush(self) -> None:
        """Export what waits; blocks."""
        self._processor.force_flush()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Until the block ends; what waits then is exported within a few seconds, or lost."""
        with _quiet():
            try:
                yield
            finally:
                self._exporter.stop_in(_STOP_S)
                await asyncio.to_thread(self._processor.shutdown)

    def _readable(self, record: RequestRecord) -> list[ReadableSpan]:
        root, *phases = request_spans(record)
        trace = record.trace
        state = _state(trace.tracestate)
        own = _context(trace, root.span_id, state)
        parent = _context(trace, root.parent_id, state, is_remote=True) if root.parent_id else None
        below = [self._made(each, _context(trace, each.span_id, state), own) for each in phases]
        return [self._made(root, own, parent, SpanKind.SERVER), *below]

    def _made(
        self,
        span: Span,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context,
            parent,
            self._resource,
            span.attributes,
            kind=kind,
            status=_FAILED if span.is_error else _UNSET,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=_SCOPE,
        )


def _state(tracestate: str) -> TraceState | None:
    """The members, which were checked: each is NAME=VALUE."""
    members = [member.split("=", 1) for member in tracestate.split(",") if member]
    return TraceState([(name, value) for name, value in members]) if members else None


def _context(
    trace: TraceContext, span_id: str, state: TraceState | None, *, is_remote: bool = False
) -> SpanContext:
    return SpanContext(int(trace.trace_id, 16), int(span_id, 16), is_remote, _SAMPLED, state)


class _Counted(SpanExporter):
    """Counts what becomes of spans, and tells the log when that changes. On the SDK's thread."""

    def __init__(
        self, inner: SpanExporter, count: Count, log: structlog.typing.FilteringBoundLogger
    ) -> None:
        self.taken = 0
        self._inner = inner
        self._count = count
        self._log = log
        self._failing = False
        self._ends_at: float | None = None

    def stop_in(self, seconds: float) -> None:
        """Let nothing more be tried once so much time has passed."""
        self._ends_at = time.monotonic() + seconds

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result, kind = self._tried(spans)
        failed = result is not SpanExportResult.SUCCESS
        self._count("failed" if failed else "exported", len(spans))
        if failed != self._failing:
            self._failing = failed
            if failed:
                self._log.warning("trace_export_failed", kind=kind)
            else:
                self._log.info("trace_export_works")
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def _tried(self, spans: Sequence[ReadableSpan]) -> tuple[SpanExportResult, str]:
        if self._ends_at is not None and time.monotonic() > self._ends_at:
            return SpanExportResult.FAILURE, "stopping"
        try:
            return self._inner.export(spans), "refused or unreachable"
        except Exception as error:
            return SpanExportResult.FAILURE, type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The SDK tells each failed try in lines of its own; here each change is told once."""
    logger = logging.getLogger("opentelemetry")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def otlp_exporter(endpoint: str) -> SpanExporter:
    """OTLP over HTTP to a collector's base address, for example http://collector:4318.

    Headers, certificates and compression come from OpenTelemetry's own variables
    (OTEL_EXPORTER_OTLP_...).
    """
    return OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
