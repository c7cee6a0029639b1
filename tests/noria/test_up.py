"""`noria up` and `noria demo` as a person runs them, with stub services."""

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from noria.client.sync_client import Client
from tests.support.command import ends, running

STUB = Path(__file__).with_name("stub_service.py")


def noria(tmp_path, *arguments, before=lambda: None, **behaviours):
    """The command with stub services that behave as told."""
    model = tmp_path / "model.gguf"
    model.touch()
    stubs = (sys.executable, str(STUB), "cli", json.dumps(behaviours))

    def prepare():
        # Whoever runs these tests may have been started by nohup.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        before()

    return running(*stubs, *arguments, "--model", str(model), preexec_fn=prepare)


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
        handles = command.child_handles()
        assert len(handles) == 4
        command.process.send_signal(number)
        assert command.exit_code() == 0
        assert all(ends(handle) for handle in handles)
    names = re.findall(r"^(.+): stopped", "\n".join(command.seen), re.MULTILINE)
    assert names == ["router", "worker 2", "worker 1", "tokenizer"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_it_stops_though_nobody_reads_what_it_says(tmp_path, number):
    """A terminal that was closed, a full disk: every write to its standard error fails."""

    def into_a_full_disk():
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)

    with noria(tmp_path, "up", "--port", "0", "--verbose", before=into_a_full_disk) as command:
        command.until("stop:")
        handles = command.child_handles()
        command.process.send_signal(number)
        assert command.exit_code() == 0
        assert all(ends(handle) for handle in handles)


def test_in_the_background_sigint_still_stops_it_and_nohup_is_respected(tmp_path):
    def ignore_both():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with noria(tmp_path, "up", "--port", "0", before=ignore_both) as command:
        command.until("stop:")
        status = Path(f"/proc/{command.process.pid}/status").read_text()
        ignored = int(re.search(r"SigIgn:\s+(\w+)", status).group(1), 16)
        assert ignored & (1 << (signal.SIGHUP - 1))
        command.process.send_signal(signal.SIGINT)
        assert command.exit_code() == 0


def test_a_signal_while_it_loads_stops_all_and_exits_0(tmp_path):
    behaviours = {"worker": "loads-for-ever"}
    with noria(
        tmp_path, "up", "--port", "0", "--verbose", router="loads-for-ever", **behaviours
    ) as command:
        command.until("router: loading")
        handles = command.child_handles()
        command.process.send_signal(signal.SIGINT)
        assert command.exit_code() == 0
        assert len(handles) == 3
        assert all(ends(handle) for handle in handles)


def test_a_second_signal_does_not_wait_for_a_child_that_will_not_stop(tmp_path):
    with noria(tmp_path, "up", "--port", "0", "--verbose", router="stubborn") as command:
        command.until("stop:")
        handles = command.child_handles()
        command.process.send_signal(signal.SIGINT)
        command.until("stopping")
        command.process.send_signal(signal.SIGTERM)
        assert command.exit_code() == 0
        assert all(ends(handle) for handle in handles)


def test_no_child_survives_a_supervisor_that_is_killed(tmp_path):
    with noria(tmp_path, "up", "--port", "0", "--verbose") as command:
        command.until("stop:")
        handles = command.child_handles()
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_without_its_answer_does_not_end_as_if_it_had_one(tmp_path, number):
    """Whoever waits for it in a script learns that it was interrupted."""
    with noria(tmp_path, "demo", "--verbose", router="loads-for-ever") as command:
        command.until("router: loading")
        handles = command.child_handles()
        command.process.send_signal(number)
        assert command.exit_code() == 130
        assert all(ends(handle) for handle in handles)
