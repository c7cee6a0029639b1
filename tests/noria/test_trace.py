"""A caller's trace context is passed on as it is, and nothing else is."""

import re

import pytest

from noria.service.trace import new_trace, parse_traceparent, trace_of

VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_valid_context_is_kept():
    assert trace_of([("traceparent", VALID)]).traceparent == VALID
    assert trace_of([("traceparent", VALID)]).trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert parse_traceparent("cc" + VALID[2:] + "-what-the-future-brings") is not None


@pytest.mark.parametrize(
    "value",
    [
        "",
        VALID.upper(),
        VALID + "-more",
        "ff" + VALID[2:],
        VALID.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        VALID.replace("b7ad6b7169203331", "0" * 16),
        VALID[:-1],
        VALID + "\n",
        "cc" + VALID[2:] + "-" + "x" * 100,
        "cc" + VALID[2:] + "-\u00e9",
    ],
)
def test_anything_else_begins_a_trace_of_its_own(value):
    made = trace_of([("traceparent", value)])
    assert parse_traceparent(value) is None
    assert parse_traceparent(made.traceparent) == made


def test_two_contexts_or_none_begin_a_trace_too():
    for metadata in ([], [("traceparent", VALID)] * 2, [("traceparent", VALID.encode())]):
        assert VALID not in trace_of(metadata).traceparent
    assert new_trace().trace_id != new_trace().trace_id
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", new_trace().traceparent)
