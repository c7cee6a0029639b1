"""Services that start and stop again and again in one process leave nothing to the next."""

import asyncio
import sys

import pytest

from tests.support.processes import ROOT

NOISE = ("different loop", "BlockingIOError", "Traceback", "never retrieved", "was destroyed")


@pytest.mark.parametrize(
    "cycles", [2, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
async def test_every_loop_is_clean_after_a_stop_under_load(cycles, golden_model, script_file):
    """GRP-06: streams run while all stops, within 5 s; the interpreter exits by itself."""
    script = script_file(mean_output_tokens=0, step_seconds=0.005, token_ids=[32, 127])
    argv = ("-m", "tests.support.start_stop", str(golden_model), str(script), str(cycles))
    running = await asyncio.create_subprocess_exec(
        sys.executable, *argv, cwd=ROOT, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await running.communicate()
    words = [line.split() for line in output.decode().splitlines()]
    seconds = [float(line[1]) for line in words if line[:1] == ["stopped"]]
    assert (running.returncode, len(seconds)) == (0, cycles), errors.decode()
    assert max(seconds) < 5
    assert not [noise for noise in NOISE if noise in errors.decode()], errors.decode()
