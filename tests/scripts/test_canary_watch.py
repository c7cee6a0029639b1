"""The watch over the whole run sees what it is there to see, and fails the run for it."""

import logging
from types import SimpleNamespace

import pytest

from tests.support.canary import API_KEY, CANARY, DISGUISES, CanaryWatch


@pytest.fixture
def watch():
    """A watch of its own, which is not listened to elsewhere."""
    return CanaryWatch()


@pytest.mark.parametrize("mark", DISGUISES)
def test_every_disguise_is_known(mark, watch):
    watch.look("metrics", f'noria_requests_total{{model="{mark}"}} 1')
    watch.look("metrics", f"{mark}".encode())
    assert len(watch.seen) == 2


def test_log_lines_and_output_are_looked_at(watch):
    watch.pytest_runtest_logstart("a test")
    watch.emit(logging.LogRecord("x", 20, "", 0, "%s", (API_KEY,), None))
    watch.pytest_runtest_logreport(SimpleNamespace(sections=[("stdout", f"a {CANARY} b")]))
    assert [(test, where) for test, where, _ in watch.seen] == [
        ("a test", "logging"),
        ("a test", "stdout"),
    ]


@pytest.mark.parametrize(("told", "status"), [("nothing", 0), (CANARY, 1)])
def test_a_run_that_told_the_mark_fails_though_its_tests_passed(told, status, watch):
    session = SimpleNamespace(exitstatus=0)
    watch.look("error", told)
    watch.pytest_sessionfinish(session, pytest.ExitCode.OK)
    assert session.exitstatus == status
