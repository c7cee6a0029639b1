"""A worker process ends when it is told to, also in the middle of what cannot be interrupted."""

import signal
import subprocess
import sys

import pytest

from tests.support.worker_client import worker_client


class Process:
    """`python -m worker` with its log read line by line."""

    def __init__(self, *flags, program=("-m", "worker")):
        self.process = subprocess.Popen(
            [sys.executable, *program, "--listen", "127.0.0.1:0", *flags],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines = []

    def until(self, event):
        for line in self.process.stderr:
            self.lines.append(line)
            if f'"event": "{event}"' in line:
                return line
        raise AssertionError(f"no {event}: {self.lines}")

    def end(self, timeout):
        self.process.send_signal(signal.SIGTERM)
        _, rest = self.process.communicate(timeout=timeout)
        self.lines.append(rest)
        return self.process.returncode

    @property
    def log(self):
        return "".join(self.lines)


@pytest.fixture
def start():
    started = []

    def make(*flags, **options):
        started.append(Process(*flags, **options))
        return started[-1]

    yield make
    for each in started:
        each.process.kill()
        each.process.wait()


@pytest.mark.model
def test_while_it_loads(start, demo_model_path):
    worker = start("--model", str(demo_model_path))
    worker.until("progress")
    assert worker.end(timeout=20) == 0
    assert '"event": "stopped"' in worker.log
    assert "Traceback" not in worker.log
    assert '"event": "ready"' not in worker.log


async def test_while_a_step_hangs(start, golden_model, script_file):
    script = script_file(
        [{"prompt_token_ids": [5], "output_token_ids": [7], "faults": {"0": {"kind": "hang"}}}]
    )
    flags = ("--model", str(golden_model), "--script", str(script), "--drain-grace-s", "0.2")
    worker = start(*flags)
    address = worker.until("listening").split('"address": "')[1].split('"')[0]
    worker.until("ready")
    async with worker_client(address) as client:
        await client.submit([5], 5)
        await client.until(lambda: client.load and client.load.step_age_ms > 0)
    assert worker.end(timeout=30) == 0
    assert "Traceback" not in worker.log


DYING = """
import threading
from worker import __main__ as worker

def die():
    raise ValueError("Xanadu")

worker._tell_cache = lambda log, facts: threading.Thread(target=die, name="any").start()
worker.main()
"""


def test_when_any_of_its_threads_dies(start, golden_model, script_file):
    """At once, as when the engine's does: what goes on without one serves nobody."""
    flags = ("--model", str(golden_model), "--script", str(script_file(mean_output_tokens=1)))
    worker = start(*flags, program=("-c", DYING))
    line = worker.until("thread crashed")
    assert '"name": "any"' in line
    assert '"kind": "ValueError"' in line
    assert worker.process.wait(timeout=30) == 1
    assert "Xanadu" not in worker.log + worker.process.stderr.read()
