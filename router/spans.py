"""A request's record as spans of its trace: one for the request, one below it for each phase.

The phases of a timeline are sums: one that a request went through twice is one span. They
stand one after the other in their usual order, so that together they fill the request's span
to the microsecond, as they do in the timeline.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from router.record import RequestRecord, RequestState

Attributes = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Span:
    """Times are nanoseconds since the epoch; an empty `parent_id`: the trace begins with it."""

    name: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    is_error: bool = False


def request_spans(record: RequestRecord) -> list[Span]:
    """The spans of a record that is over. They hold no text, no token id and no key."""
    total_us, phases = record.timeline.read()
    trace, begun_ns = record.trace, record.accepted_unix_us * 1000
    spans = [
        Span(
            record.method,
            trace.span_id,
            trace.parent_id,
            begun_ns,
            begun_ns + total_us * 1000,
            _attributes(record),
            is_error=record.state is RequestState.FAILED,
        )
    ]
    for phase, us in phases:
        end_ns = begun_ns + us * 1000
        name = phase.name.lower()
        spans.append(Span(name, secrets.token_hex(8), trace.span_id, begun_ns, end_ns, {}))
        begun_ns = end_ns
    return spans


def _attributes(record: RequestRecord) -> Attributes:
    """Named as OpenTelemetry's conventions for generative AI and for RPC have it, or `noria.*`."""
    told: dict[str, str | int] = {
        "rpc.system": "grpc",
        "rpc.service": "noria.v1.ChatService",
        "rpc.method": record.method,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.input_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "noria.request_id": record.request_id,
        "noria.tenant": record.tenant,
        "noria.outcome": "SERVED" if record.reason is None else record.reason.value,
        "noria.worker_id": record.worker_id,
        "noria.attempts": record.attempts,
        "noria.preemptions": record.preemptions,
        "noria.cached_tokens": record.cached_tokens,
        "noria.wasted_tokens": record.wasted_tokens,
    }
    return {name: value for name, value in told.items() if value != ""}
