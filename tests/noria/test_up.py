"""`noria up` and `noria demo` as a person runs them, with stub services."""

import contextlib
import json
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from noria.client.sync_client import Client

STUB = Path(__file__).with_name("stub_service.py")
SECONDS = 30


class Command:
    """A running `noria` command and the lines it writes."""

    def __init__(self, process):
        self.process = process
        self.seen = []
        self._lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def until(self, pattern):
        """Read lines until one matches."""
        while (line := self._lines.get(timeout=SECONDS)) is not None:
            self.seen.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no line with {pattern!r} in {self.seen}")

    def exit_code(self):
        """Wait for the end; everything written is then in `seen`."""
        while (line := self._lines.get(timeout=SECONDS)) is not None:
            self.seen.append(line)
        return self.process.wait(SECONDS)

    def pid_handles(self):
        """Handles of all children seen so far: they tell when those end."""
        pids = re.findall(r": pid .*pid=(\d+)", "\n".join(self.seen))
        return [os.pidfd_open(int(pid)) for pid in pids]


def ends(handle):
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(SECONDS * 1000))


@contextlib.contextmanager
def noria(tmp_path, *arguments, **behaviours):
    (tmp_path / "model.gguf").touch()
    model = ("--model", str(tmp_path / "model.gguf")) if arguments[0] != "chat" else ()
    process = subprocess.Popen(
        [sys.executable, str(STUB), "cli", json.dumps(behaviours), *arguments, *model],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    command = Command(process)
    try:
        yield command
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(SECONDS)


def test_up_says_where_it_listens_and_the_key_file_lets_a_client_in(tmp_path):
    with noria(tmp_path, "up", "--port", "0") as command:
        address = command.until(r"serving: model on (\S+)").group(1)
        command.until(r'ask: +noria chat --address \S+ "')
        with Client(address) as client:
            assert client.chat("q").text == "Yes, it is."
        command.process.send_signal(signal.SIGINT)
        assert command.exit_code() == 0
    assert "worker: loading weights" in command.seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_stops_all_in_order_and_exits_0(tmp_path, number):
    with noria(tmp_path, "up", "--port", "0", "--workers", "2", "--verbose") as command:
        command.until("stop:")
        handles = command.pid_handles()
        assert len(handles) == 4
        command.process.send_signal(number)
        assert command.exit_code() == 0
        assert all(ends(handle) for handle in handles)
    names = re.findall(r"^(.+): stopped", "\n".join(command.seen), re.MULTILINE)
    assert names == ["router", "worker 2", "worker 1", "tokenizer"]


def test_a_signal_while_it_loads_stops_all_and_exits_0(tmp_path):
    behaviours = {"worker": "loads-for-ever"}
    with noria(
        tmp_path, "up", "--port", "0", "--verbose", router="loads-for-ever", **behaviours
    ) as command:
        command.until("router: loading")
        handles = command.pid_handles()
        command.process.send_signal(signal.SIGINT)
        assert command.exit_code() == 0
        assert len(handles) == 3
        assert all(ends(handle) for handle in handles)


def test_a_second_signal_does_not_wait_for_a_child_that_will_not_stop(tmp_path):
    with noria(tmp_path, "up", "--port", "0", "--verbose", router="stubborn") as command:
        command.until("stop:")
        handles = command.pid_handles()
        command.process.send_signal(signal.SIGINT)
        command.until("stopping")
        command.process.send_signal(signal.SIGTERM)
        assert command.exit_code() == 0
        assert all(ends(handle) for handle in handles)


def test_no_child_survives_a_supervisor_that_is_killed(tmp_path):
    with noria(tmp_path, "up", "--port", "0", "--verbose") as command:
        command.until("stop:")
        handles = command.pid_handles()
        assert len(handles) == 3
        command.process.kill()
        assert all(ends(handle) for handle in handles)


@pytest.mark.parametrize("module", ["tokenizer_svc", "worker", "router"])
def test_a_service_that_dies_while_it_starts_is_shown_with_its_last_lines(tmp_path, module):
    with noria(tmp_path, "up", "--port", "0", "--verbose", **{module: "dies"}) as command:
        assert command.exit_code() == 1
    name = "tokenizer" if module == "tokenizer_svc" else module
    assert "  no such weights" in command.seen
    assert f"Error: {name} ended by itself (exit status 1); everything is stopped" in command.seen


def test_a_service_that_dies_later_is_named_and_everything_stops(tmp_path):
    with noria(tmp_path, "up", "--port", "0", "--verbose") as command:
        pid = command.until(r"^worker: pid .*pid=(\d+)").group(1)
        command.until("stop:")
        os.kill(int(pid), signal.SIGUSR1)
        assert command.exit_code() == 1
    assert "Error: worker ended by itself (exit status 4); everything is stopped" in command.seen
    assert [line.split(":")[0] for line in command.seen if ": stopped" in line] == [
        "router",
        "tokenizer",
    ]


def test_a_taken_port_is_named_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with noria(tmp_path, "up", "--port", port) as command:
            assert command.exit_code() == 1
    assert command.seen == [f"Error: port {port} on 127.0.0.1 is taken; choose another with --port"]


def test_demo_streams_the_answer_repeats_it_on_one_line_and_stops(tmp_path):
    with noria(tmp_path, "demo") as command:
        assert command.exit_code() == 0
    assert "Yes, it is." in command.seen
    assert any(re.fullmatch(r"ready in \d+\.\d s", line) for line in command.seen)
    assert command.seen[-1] == "answer: Yes, it is."
