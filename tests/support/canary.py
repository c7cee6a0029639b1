"""A mark in the prompts, replies and keys of the tests, and who looks that nothing tells it."""

import hashlib
import json
import logging

import grpc
import pytest
import structlog

from noria.client.errors import NoriaError
from router import wire_record

CANARY = "Kanarie5e1c09"
API_KEY = f"noria-test-key-{CANARY}"
# What becomes of it where something quotes it in one way or another, and the key's digest.
DISGUISES = (
    CANARY,
    CANARY.lower(),
    CANARY[::-1],
    CANARY.encode().hex(),
    hashlib.sha256(API_KEY.encode()).hexdigest(),
)


def disguised(told) -> str | None:
    """The mark as it stands in a text, bytes, or whatever has a representation; None: nowhere."""
    text = told.decode("latin-1") if isinstance(told, bytes) else str(told)
    return next((mark for mark in DISGUISES if mark in text), None)


class CanaryWatch(logging.Handler):
    """A pytest plugin: a run in which anything told the mark fails at its end.

    It looks at every log line (structlog's and logging's), at all that a test or a process
    that it started wrote, at every error that a client got, every record, and, by `look`, at
    what helpers of the tests hand to it: metrics, and what services write as processes.
    """

    def __init__(self):
        super().__init__()
        self.seen = []
        self._test = ""

    def look(self, where, told):
        mark = disguised(told)
        if mark is not None:
            self.seen.append((self._test, where, mark))

    def emit(self, record):
        self.look("logging", f"{record.getMessage()} {record.exc_text} {record.exc_info}")

    def pytest_configure(self, config):
        logging.getLogger().addHandler(self)
        self._watch(structlog.testing.LogCapture, "__call__", "structlog", lambda args: args[3])
        self._watch(grpc.aio.AioRpcError, "__init__", "error", lambda args: args[1:])
        self._watch(NoriaError, "__init__", "error", lambda args: args[1:])
        for name in ("timeline", "request"):
            self._watch_result(wire_record, name)

    def _watch(self, owner, name, where, told):
        original = getattr(owner, name)

        def watched(*args, **named):
            self.look(where, f"{told(args)} {named}")
            return original(*args, **named)

        setattr(owner, name, watched)

    def _watch_result(self, owner, name):
        original = getattr(owner, name)

        def watched(*args, **named):
            result = original(*args, **named)
            self.look(f"wire_record.{name}", result.SerializeToString())
            return result

        setattr(owner, name, watched)

    @pytest.hookimpl
    def pytest_runtest_logstart(self, nodeid):
        self._test = nodeid

    def pytest_runtest_logreport(self, report):
        for title, content in report.sections:
            self.look(title, content)

    def pytest_sessionfinish(self, session, exitstatus):
        if self.seen and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for test, where, mark in self.seen:
            terminalreporter.write_line(f"{test}: {where} tells what callers sent ({mark})")


WATCH = CanaryWatch()


def look(where, told):
    """Have something looked at that no other part of the run shows."""
    WATCH.look(where, told if isinstance(told, str) else json.dumps(told, default=str))
