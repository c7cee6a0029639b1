"""A device that cannot go on ends its worker with a line; other errors are their batch's alone."""

import asyncio
from concurrent.futures import Future
from pathlib import Path

import pytest
import structlog
import torch

from tests.support.engines import make_scheduler, make_sequence
from worker.__main__ import _until_stopped
from worker.config import WorkerConfig
from worker.device.errors import telling_lost_device
from worker.engine import Engine
from worker.engine_thread import EngineThread
from worker.flights import DeviceLostError

LOST = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nsee"), "out of memory in a step: "),
    (torch.AcceleratorError("CUDA error: an illegal memory access\nCUDA kernel"), "failed in a"),
]


@pytest.mark.parametrize(("error", "told"), LOST)
def test_what_a_device_cannot_survive_is_told_in_one_line(error, told):
    with pytest.raises(DeviceLostError, match=told) as raised, telling_lost_device("in a step"):
        raise error
    assert "\n" not in str(raised.value)


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes") as raised, telling_lost_device("in a step"):
        raise RuntimeError("shapes differ")
    assert not isinstance(raised.value, DeviceLostError)


class Lost:
    """Fails when it launches a step, or when that is collected."""

    def __init__(self, where):
        self.where = where

    def launch(self, output):
        return self.fail("launch") or self

    def collect(self):
        self.fail("collect")

    def fail(self, where):
        if where == self.where:
            raise DeviceLostError("out of memory")


@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_engine_ends_and_books_nothing_more(where, ahead):
    """The router counts what its session held as lost, and places it again."""
    outputs = []

    def build():
        return Engine(make_scheduler(), Lost(where), look_ahead=4, steps_ahead=ahead), "facts"

    with EngineThread(build, outputs.append) as thread:
        thread.submit(make_sequence(1))
        assert isinstance(thread.crashed.result(timeout=10), DeviceLostError)
    assert not any(output.ended for output in outputs)


async def test_the_process_ends_with_the_reason():
    class Worker:
        async def crashed(self):
            failed = Future()
            failed.set_result(DeviceLostError("out of memory in a step"))
            return await asyncio.wrap_future(failed)

        async def ready(self):
            await asyncio.Event().wait()

    death, config = asyncio.get_running_loop().create_future(), WorkerConfig(model=Path("m"))
    with structlog.testing.capture_logs() as logs:
        log = structlog.get_logger()
        status = await _until_stopped(Worker(), asyncio.Event(), death, config, log)
    assert status == 1
    assert logs == [
        {"event": "device lost", "reason": "out of memory in a step", "log_level": "error"}
    ]
