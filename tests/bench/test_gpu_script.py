"""`python -m bench.gpu` on a CPU: the same script in its smallest form, and what it survives."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.gpu import models, parts
from bench.gpu.__main__ import TASKS, here, main, run_all
from bench.gpu.isolation import Task, isolated
from bench.gpu.rows import FAILED, OK, SKIPPED, Ceilings, Row, Unfit, attempt, line, table
from bench.gpu.setting import Setting, seconds_of
from worker.attention.selection import GPU_BACKENDS

ROOT = Path(__file__).resolve().parents[2]
# Refuses every package but those that a GPU machine is asked to have, and what torch brings.
BLOCKER = """
import re, sys
from importlib.metadata import requires
allowed = {"torch", "triton", "numpy", "safetensors", "noria", "worker", "bench", "torchgen"}
allowed |= {re.match(r"[\\w-]+", r)[0].replace("-", "_").lower() for r in requires("torch")}
allowed |= {"mpmath", "markupsafe"} | set(sys.stdlib_module_names)
class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if path is None and top.lower() not in allowed and not top.startswith("_"):
            raise ModuleNotFoundError(f"{top} is not on this machine")
sys.meta_path.insert(0, Blocker())
"""


def in_a_bare_process(code, timeout=110):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + code], cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def test_the_whole_script_runs_with_four_packages_alone():
    """On a CPU: every part, tiny, its kernels interpreted; it names what it skipped."""
    pytest.importorskip("triton", reason="triton is not installed: pip install noria[gpu]")
    ran = in_a_bare_process(
        "from bench.gpu.__main__ import here, main\n"
        "sys.exit(main(['--device', 'cpu', '--tiny'], run=here))"
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [row.split(" | ") for row in ran.stdout.splitlines() if row.startswith("| ")]
    outcomes = {(row[0].removeprefix("| "), row[1]): row[2] for row in rows}
    assert {part for part, _ in outcomes} >= {task.name for task in TASKS}
    assert outcomes["conformance", "triton torch.float32"] == OK
    assert outcomes["conformance", "flash_attn_2"] == SKIPPED
    assert outcomes["layer", "triton: decode 2 x 20"] == OK
    assert outcomes["layer", "triton: prefill 1 x 20"] == OK
    assert outcomes["graphs", "triton: padded to 2"] == OK
    assert outcomes["engine", "triton: 2 x 12, decode"] == OK
    assert FAILED not in outcomes.values()


def test_the_bare_process_has_nothing_else():
    """Of a package that is installed here."""
    ran = in_a_bare_process("import grpc")
    assert "grpc is not on this machine" in ran.stderr


def test_every_gpu_backend_is_checked():
    checked = {argument for task in TASKS for argument in task.arguments}
    assert checked == set(GPU_BACKENDS)


def raising(setting):
    yield Row("part", "first")
    raise RuntimeError("broken")


def dying(setting):
    yield Row("part", "first")
    os._exit(7)


def hanging(setting):
    import time

    yield Row("part", "first")
    time.sleep(60)
    yield Row("part", "never")


def task(function, seconds=5.0):
    return Task("part", __name__, function.__name__, seconds)


def test_a_part_that_raises_ends_alone():
    rows = list(run_all([task(raising), task(raising)], "cpu", True, 60, here))
    assert [row.name for row in rows] == ["first", "the rest"] * 2
    assert rows[1].outcome == FAILED
    assert rows[1].note == "RuntimeError: broken"


def test_a_part_that_dies_ends_alone():
    died = list(isolated(task(dying), "cpu", True, 30))
    assert [(row.name, row.outcome) for row in died] == [("first", OK), ("the rest", FAILED)]
    assert died[1].note == "the process died: 7"


@pytest.mark.soak
def test_a_part_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr("bench.gpu.isolation._GRACE_S", 3.0)
    hung = list(isolated(task(hanging), "cpu", True, 1))
    assert hung[-1] == Row("part", "the rest", FAILED, note="hung after 1 s; ended")
    assert "never" not in {row.name for row in hung}


def test_when_the_time_is_over_the_rest_is_named():
    rows = list(run_all(TASKS, "cpu", True, 0, here))
    assert {row.outcome for row in rows} == {SKIPPED}
    assert len(rows) == len(TASKS)


def test_nothing_begins_that_could_not_end_in_four_minutes(capsys):
    """The last part may take its grace beyond the time, and its process some seconds to end."""
    from bench.gpu import isolation

    given = []

    def run(task, device, tiny, seconds):
        given.append((task, seconds))
        yield Row(task.name, "ran")

    assert main([], run=run) == 0
    assert len(given) == len(TASKS)
    assert all(0 < seconds <= task.seconds for task, seconds in given)
    assert 210 + isolation._GRACE_S + 10 <= 240
    assert capsys.readouterr().out.count("ran") == 2 * len(TASKS)


def test_a_failure_is_an_exit_status_of_one(capsys):
    def run(task, *args):
        yield Row(task.name, "it", FAILED, note="why")

    assert main(["--only", "layer"], run=run) == 1
    assert "| layer | it | FAILED |" in capsys.readouterr().out


def unfit():
    raise Unfit("9 bytes, 8 are free")


def test_what_does_not_fit_is_skipped_and_what_raises_failed():
    assert attempt("p", "n", unfit) == Row("p", "n", SKIPPED, note="9 bytes, 8 are free")
    failed = attempt("p", "n", lambda: Row("", "", seconds=1 / 0))
    assert failed == Row("p", "n", FAILED, note="ZeroDivisionError: division by zero")


def test_rates_stand_beside_the_ceilings_of_the_same_run():
    rows = [
        Row("ceilings", "copy", seconds=0.5, moved=2e12),
        Row("ceilings", "product", seconds=0.5, computed=4e14),
        Row("layer", "it", seconds=0.001, moved=1e9, computed=2e11, tokens=32),
    ]
    assert Ceilings.among(rows) == Ceilings(4e12, 8e14)
    assert Ceilings.among([]) == Ceilings()
    told = (
        "| layer | it | ok | 1.000 ms | 32,000 tokens/s | 1000 GB/s (25%) | 200 TFLOP/s (25%) |  |"
    )
    assert table(rows).splitlines()[-1] == told
    assert "1000 GB/s (25%)" in line(rows[2], Ceilings.among(rows))
    assert "4000 GB/s" in table(rows)


class Pretended(Setting):
    """A CPU that says it is a GPU."""

    is_cuda = True


class Graph:
    replays = 0

    def replay(self):
        Graph.replays += 1


class Event:
    """Milliseconds apart."""

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 30.0


@pytest.fixture
def pretended(monkeypatch):
    """torch.cuda as far as the parts ask for it, over the CPU."""
    about = SimpleNamespace(
        name="Card", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30
    )
    stubs = {
        "synchronize": lambda: None, "empty_cache": lambda: None, "CUDAGraph": Graph,
        "graph": lambda graph: nullcontext(), "Event": Event,
        "mem_get_info": lambda device: (1 << 30, 2 << 30),
        "get_device_properties": lambda device: about,
    }  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setattr(f"torch.cuda.{name}", stub)
    Graph.replays = 0
    return Pretended.of("cpu", True, 60)


def test_on_a_gpu_the_time_is_that_of_replays(pretended):
    ran = []
    assert seconds_of(pretended, lambda: ran.append(1), 10) == pytest.approx(0.003)
    # Once to warm up, once to be captured.
    assert (len(ran), Graph.replays) == (2, 11)


def test_the_parts_ask_nothing_of_a_gpu_that_torch_does_not_have(pretended):
    """Every row of these on a CPU that says it is a GPU."""
    rows = [*parts.found(pretended), *parts.ceilings(pretended)]
    assert [row for row in rows if row.outcome == FAILED] == []
    assert rows[0].note.startswith("Card, compute capability 9.0, 132 multiprocessors, 141 GiB")
    assert {row.seconds for row in rows if row.part == "ceilings"} == {0.003}


@pytest.mark.soak
def test_a_layer_on_a_gpu_asks_nothing_that_torch_does_not_have(pretended):
    rows = list(parts.layer(pretended))
    assert {row.outcome for row in rows} == {OK}
    assert {row.seconds for row in rows} == {30 / 1e3 / 2}


def test_what_does_not_fit_on_the_gpu_is_named(pretended, monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1000, 2000))
    row = next(iter(parts.layer(pretended)))
    assert row.outcome == SKIPPED
    assert "bytes of keys and values, 1,000 are free" in row.note
    assert next(iter(models.engine(pretended))).note.endswith("bytes of weights, 1,000 are free")
