"""A caller's trace context is passed on as it is, and nothing else is."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.service.trace import (
    caller_trace,
    new_trace,
    parse_traceparent,
    parse_tracestate,
    trace_of,
)

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


@pytest.mark.parametrize(("flags", "sampled"), [("00", "00"), ("01", "01"), ("ff", "01")])
def test_a_span_of_ones_own_has_the_callers_as_its_parent_and_its_sampling(flags, sampled):
    """Flags that nobody has defined yet are not passed on with another parent."""
    caller = trace_of([("traceparent", VALID[:-2] + flags), ("tracestate", "a=1")])
    own = caller.child()
    assert (own.parent_id, own.trace_id, own.tracestate) == (VALID[36:52], VALID[3:35], "a=1")
    assert own.is_sampled is caller.is_sampled is (sampled == "01")
    assert re.fullmatch(f"00-{own.trace_id}-{own.span_id}-{sampled}", own.traceparent)
    assert own.span_id != caller.span_id


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("a=1", "a=1"),
        ("a=1 , t@vendor=x y,,b/-*_=~", "a=1,t@vendor=x y,b/-*_=~"),
        ("", ""),
        ("a", ""),
        ("A=1", ""),
        ("a=1,a=2", ""),
        ("a=b=c", ""),
        ("a=\u00e9", ""),
        ("a=x\n", ""),
        (",".join(f"k{n}=1" for n in range(33)), ""),
        ("a=" + "x" * 511, ""),
        ("a=" + "x" * 257, ""),
    ],
)
def test_a_trace_state_is_kept_if_it_is_a_valid_list(value, kept):
    assert parse_tracestate(value) == kept


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["traceparent", "tracestate"]), st.text()), max_size=4))
def test_no_metadata_does_any_harm(metadata):
    context = caller_trace(metadata)
    assert context is None or parse_traceparent(context.traceparent)
    assert parse_traceparent(trace_of(metadata).child().traceparent)
