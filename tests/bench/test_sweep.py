"""The sweep names the batch that serves best within what a stream may wait."""

import pytest
from rich.console import Console

from bench.load.outcome import SERVED, Outcome
from bench.load.runner import Run
from bench.load.summary import Objective, summarize
from bench.sweep import Point, advice, sweep_table
from bench.sweep_plot import plot_sweep


def point(size, step_ms):
    """`size` streams of 11 tokens, all at once, a step of so many milliseconds for each."""
    times = [0.5 + index * step_ms / 1e3 for index in range(11)]
    outcomes = [
        Outcome(i, 0.0, message_times=times, output_tokens=11, ended=SERVED) for i in range(size)
    ]
    return Point(size, summarize(Run(outcomes=outcomes, ended_at=times[-1]), Objective()))


POINTS = [point(1, 10), point(4, 12), point(16, 30)]


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (None, "most tokens/s with --max-num-seqs 16"),
        (15, "the largest that keeps 15 ms a token: --max-num-seqs 4"),
        (40, "the largest that keeps 40 ms a token: --max-num-seqs 16"),
        (5, "no batch keeps 5 ms a token; --max-num-seqs 1: 10.0"),
    ],
)
def test_the_largest_batch_within_the_target_is_named(target, told):
    assert advice(POINTS, target) == told


def test_the_table_tells_gains_against_the_smallest_batch():
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(sweep_table(POINTS))
    rows = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    (row,) = [row for row in rows if row[:1] == ["16"]]
    assert row == ["16", "220.0", "12.0x", "500.0", "500.0", "30.0", "30.0"]


def test_the_plot_is_a_picture(tmp_path):
    plot_sweep(POINTS, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
