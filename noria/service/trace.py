"""W3C trace context (https://www.w3.org/TR/trace-context/): who a request's log lines belong to.

`traceparent` is VERSION-TRACEID-PARENTID-FLAGS in lower-case hex. What a caller sends is
passed on as it is if it has that form; otherwise the request begins a trace of its own.
"""

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

TRACEPARENT = "traceparent"

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-[!-~]*)?")
# Later versions may append fields; this is as much of them as is passed on.
_MAX_LENGTH = 128


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A valid `traceparent` and the trace id in it, 32 hex digits."""

    traceparent: str
    trace_id: str


def parse_traceparent(value: str) -> TraceContext | None:
    """The context, or None for a value that is not of the form."""
    match = _FORM.fullmatch(value) if len(value) <= _MAX_LENGTH else None
    if match is None:
        return None
    version, trace_id, parent_id, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if not (int(trace_id, 16) and int(parent_id, 16)):
        return None
    return TraceContext(value, trace_id)


def new_trace() -> TraceContext:
    """A trace that begins here and is not sampled."""
    trace_id = secrets.token_hex(16)
    return TraceContext(f"00-{trace_id}-{secrets.token_hex(8)}-00", trace_id)


def trace_of(metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext:
    """The caller's context if the metadata carries exactly one that is valid, or a new one."""
    values = [value for name, value in metadata if name == TRACEPARENT]
    if len(values) == 1 and isinstance(values[0], str):
        return parse_traceparent(values[0]) or new_trace()
    return new_trace()
