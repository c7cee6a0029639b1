"""Why a worker is given no requests, in one word."""

import pytest

from noria.v1 import admin_pb2
from router.breaker import BreakerState
from router.condition import Condition, condition_of
from router.registry import Registry
from router.worker_state import LoadReport, WorkerFigures, WorkerState

NOW = 100.0


class Line:
    def submit(self, generation, attempt, submit_number): ...
    def abort(self, submit_number): ...
    def abort_choice(self, submit_number, choice): ...
    def set_draining(self, draining): ...


def worker(*, received_at=NOW, draining=False, fingerprint="f"):
    figures = WorkerFigures("i", "m", (), fingerprint, 100, 4, 16, 8, 0)
    made = WorkerState("w", figures, Line())
    made.report(LoadReport(received_at, 0, 0, 0, 0, 8, draining))
    return made


def registry():
    made = Registry()
    made.tell_vocabulary("t", "m", "f")
    return made


@pytest.mark.parametrize(
    ("given", "condition"),
    [
        ({}, Condition.READY),
        ({"draining": True}, Condition.DRAINING),
        ({"received_at": NOW - 60}, Condition.SILENT),
        ({"received_at": NOW - 60, "draining": True}, Condition.SILENT),
        ({"fingerprint": "g", "draining": True}, Condition.MISMATCHED),
    ],
)
def test_the_gravest_reason_is_told(given, condition):
    assert condition_of(worker(**given), registry(), NOW) is condition


def test_a_worker_whose_breaker_is_open_is_failing_until_it_closes():
    made = worker()
    for number in range(5):
        made.breaker.failed(number, NOW)
    assert condition_of(made, registry(), NOW) is Condition.FAILING
    assert made.breaker.state(NOW) is BreakerState.OPEN
    assert made.breaker.state(NOW + 5) is BreakerState.HALF_OPEN


def test_conditions_and_breaker_states_are_those_of_the_wire():
    told = set(admin_pb2.WorkerState.keys()) - {
        "WORKER_STATE_UNSPECIFIED", "WORKER_STATE_UNREACHABLE",
    }  # fmt: skip
    assert {f"WORKER_STATE_{each.name}" for each in Condition} == told
    assert {f"BREAKER_STATE_{each.name}" for each in BreakerState} == set(
        admin_pb2.BreakerState.keys()
    ) - {"BREAKER_STATE_UNSPECIFIED"}
