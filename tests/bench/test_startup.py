"""A start is cut into stages by the events that the services tell."""

import subprocess
import sys

import pytest

from bench.startup import Run, import_times, stage_medians, take_line

LINES = [
    (0.5, "tokenizer: listening level=info address=127.0.0.1:1 metrics="),
    (0.6, "worker: listening level=info address=127.0.0.1:2 metrics="),
    (0.7, "worker: progress level=info stage=importing torch done=0 total=1"),
    (2.0, "worker: progress level=info stage=loading weights done=0 total=9"),
    (2.5, "worker: progress level=info stage=loading weights done=4 total=9"),
    (3.0, "worker: progress level=info stage=loading weights done=9 total=9"),
    (3.1, "a line of somebody else's"),
    (3.5, "worker: ready level=info seconds=3.4 model=m"),
]


def started(later=0.0):
    run = Run()
    run.mark("worker", 0.25, "interpreter and imports")
    for at, line in LINES:
        take_line(run, line, at + later)
    return run


def test_every_moment_until_ready_belongs_to_one_stage():
    stages = [stage for stage in started().stages() if stage[0] == "worker"]
    ends = [begun + seconds for _, _, begun, seconds in stages]
    assert [begun for _, _, begun, _ in stages[1:]] == pytest.approx(ends[:-1])
    assert (stages[0][2], ends[-1]) == (0.25, 3.5)
    taken = {stage: seconds for _, stage, _, seconds in stages}
    assert taken["importing torch"] == pytest.approx(1.3)
    assert taken["loading weights"] == pytest.approx(1.0)


def test_several_starts_are_told_by_their_medians():
    medians = stage_medians([started(), started(0.1), started(5.0)])
    begun, seconds = medians["worker", "loading weights"]
    assert (begun, seconds) == (pytest.approx(2.1), pytest.approx(1.0))


def test_a_package_is_told_with_all_that_it_imports():
    times = import_times("worker.__main__")
    assert 0 < times["grpc"] < times["worker.__main__"]


def test_a_worker_listens_before_it_imports_torch():
    program = "import sys, worker.__main__; print('torch' in sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "False"
