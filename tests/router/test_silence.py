"""How long a worker may be silent, and how lookups with a refused key are told of."""

import grpc
import pytest
import structlog

from noria.v1 import chat_pb2
from tests.router.fakes import FakeWorker, bearer, events, failure, routed, until


async def test_the_thresholds_of_silence_are_the_configurations():
    """Out of date after 0.2 s, stalled after 0.3 s: what has not begun moves to the other."""
    workers = FakeWorker(), FakeWorker()
    async with routed(*workers, load_ttl_s=0.2, stall_min_s=0.3) as setup:
        call = setup.stream()
        silent, other = await setup.holder()
        other.auto = [10]
        other.say_load()
        await until(lambda: other.say_load() or other.submits)
        assert await events(call)
        assert silent.aborts == [1]


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("GetRequest", chat_pb2.GetRequestRequest),
        ("CancelRequest", chat_pb2.CancelRequestRequest),
        ("ListModels", chat_pb2.ListModelsRequest),
    ],
)
async def test_a_lookup_with_a_wrong_key_has_one_line_and_is_counted(method, request_type):
    """SEC-03: its method and the reason, and nothing that was sent."""
    with structlog.testing.capture_logs() as lines:
        async with routed() as setup:
            lookup = getattr(setup.stub, method)
            code, _ = await failure(lookup(request_type(), metadata=bearer("wrong")))
            assert code is grpc.StatusCode.UNAUTHENTICATED
            labels = {"method": method, "outcome": "INVALID_KEY"}
            read = setup.router.metrics_registry.get_sample_value
            assert read("noria_lookups_refused_total", labels) == 1
    (line,) = [line for line in lines if line["event"] == "lookup_refused"]
    assert (line["method"], line["outcome"]) == (method, "INVALID_KEY")
    assert set(line) <= {"event", "log_level", "method", "outcome", "trace_id", "service"}
