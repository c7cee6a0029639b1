"""W3C trace context (https://www.w3.org/TR/trace-context/): which trace a request belongs to.

`traceparent` is VERSION-TRACEID-PARENTID-FLAGS in lower-case hex. What a caller sends is
passed on as it is if it has that form, or, by a service that tells of its own part as a span,
with that span as the parent; otherwise the request begins a trace of its own.
"""

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
# Later versions may append fields; this is as much of them as is passed on.
_MAX_LENGTH = 128
# As much as everybody has to pass on; a list that is longer is not kept.
_MAX_STATE_LENGTH = 512
_MAX_STATE_MEMBERS = 32
_STATE_KEY = r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_STATE_MEMBER = re.compile(rf"({_STATE_KEY})=[ -+\--<>-~]{{0,255}}[!-+\--<>-~]")
_SAMPLED = 0x01

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A valid `traceparent` and the trace id in it, 32 hex digits.

    `tracestate` is what others keep with the trace, empty or valid. `parent_id` is the span above
    the one that `traceparent` names, 16 hex digits; empty: none is known here.
    """

    traceparent: str
    trace_id: str
    tracestate: str = ""
    parent_id: str = ""

    @property
    def span_id(self) -> str:
        """The span that `traceparent` names, 16 hex digits."""
        return self.traceparent[36:52]

    @property
    def is_sampled(self) -> bool:
        return bool(int(self.traceparent[53:55], 16) & _SAMPLED)

    def child(self) -> "TraceContext":
        """A span of one's own below the caller's, sampled if the caller's is."""
        made = _context(self.trace_id, is_sampled=self.is_sampled)
        return TraceContext(made, self.trace_id, self.tracestate, parent_id=self.span_id)


# Of what was asked by nobody, as in tests: no valid id is all zeros.
NO_TRACE = TraceContext(f"00-{'0' * 32}-{'0' * 16}-00", "")


def parse_traceparent(value: str) -> TraceContext | None:
    """The context, or None for a value that is not of the form."""
    match = _FORM.fullmatch(value) if len(value) <= _MAX_LENGTH else None
    if match is None:
        return None
    version, trace_id, parent_id, _, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if not (int(trace_id, 16) and int(parent_id, 16)):
        return None
    return TraceContext(value, trace_id)


def parse_tracestate(value: str) -> str:
    """The list, with blanks between its members left out; empty for one that is not valid."""
    if len(value) > _MAX_STATE_LENGTH:
        return ""
    members = [member for part in value.split(",") if (member := part.strip(" \t"))]
    matches = [_STATE_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in matches if match}
    if len(keys) != len(members) or len(members) > _MAX_STATE_MEMBERS:
        return ""
    return ",".join(members)


def new_trace(*, is_sampled: bool = False) -> TraceContext:
    """A trace that begins here."""
    trace_id = secrets.token_hex(16)
    return TraceContext(_context(trace_id, is_sampled=is_sampled), trace_id)


def caller_trace(metadata: Metadata) -> TraceContext | None:
    """The caller's context if the metadata carries exactly one that is valid."""
    found: dict[str, list[str | bytes]] = {TRACEPARENT: [], TRACESTATE: []}
    for name, value in metadata:
        if name in found:
            found[name].append(value)
    parent, *more = found[TRACEPARENT] or [""]
    context = None if more or isinstance(parent, bytes) else parse_traceparent(parent)
    if context is None:
        return None
    state = ",".join(value for value in found[TRACESTATE] if isinstance(value, str))
    return TraceContext(context.traceparent, context.trace_id, parse_tracestate(state))


def trace_of(metadata: Metadata) -> TraceContext:
    """The caller's context, or a new one."""
    return caller_trace(metadata) or new_trace()


def trace_id_of(traceparent: str) -> str:
    """The trace id in it, for log lines; empty for what is no `traceparent`."""
    context = parse_traceparent(traceparent)
    return "" if context is None else context.trace_id


def _context(trace_id: str, *, is_sampled: bool) -> str:
    return f"00-{trace_id}-{secrets.token_hex(8)}-{_SAMPLED if is_sampled else 0:02x}"
