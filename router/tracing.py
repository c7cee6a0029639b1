"""Where requests' traces begin and end: at a collector if there is one, else nowhere."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import structlog

from noria.service.trace import Metadata, TraceContext, trace_of
from router.config import RouterConfig
from router.record import RequestRecord


class TracingMissingError(ValueError):
    """A collector is named, and what speaks to it is not installed."""


class Tracing(Protocol):
    """Begins the trace of a request, and hears of its record once it is over."""

    def begin(self, metadata: Metadata) -> TraceContext: ...

    def on_end(self, record: RequestRecord) -> None: ...

    def running(self) -> contextlib.AbstractAsyncContextManager[None]: ...


class PassedOn:
    """Without a collector: a caller's trace is passed on as it is."""

    def begin(self, metadata: Metadata) -> TraceContext:
        return trace_of(metadata)

    def on_end(self, record: RequestRecord) -> None:
        del record

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield


def new_tracing(
    config: RouterConfig,
    instance_id: str,
    count: Callable[[str, int], None],
    log: structlog.typing.FilteringBoundLogger,
) -> Tracing:
    """What the configuration asks for. Raises TracingMissingError."""
    if not config.otlp_endpoint:
        return PassedOn()
    # Here, since a router without a collector needs no package for it.
    try:
        from router import span_export
    except ImportError:
        missing = 'otlp-endpoint: its packages are missing: pip install "noria[otel]"'
        raise TracingMissingError(missing) from None
    return span_export.SpanExport(
        span_export.otlp_exporter(config.otlp_endpoint),
        sample_ratio=config.otlp_sample_ratio,
        instance_id=instance_id,
        count=count,
        log=log,
    )
