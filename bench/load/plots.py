"""A run as pictures: when requests ran, and how long their clients waited."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.load.outcome import Outcome
from bench.load.runner import Run

INK, ACCENT, SOFT, BAD = "#22333b", "#0a9396", "#94d2bd", "#bb3e03"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in Noria's dress; nothing here opens a window."""
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    return Figure(figsize=(width, height), layout="constrained")


def plot_run(run: Run, title: str, path: Path) -> None:
    """Write a PNG: requests over time, tokens/s, and the distributions of two latencies."""
    figure = new_figure(10, 7)
    lives, rate, ttft, gap = figure.subplots(2, 2).flat
    ended = sorted((o for o in run.outcomes if o.ended), key=lambda o: o.planned_at)
    _draw_lives(lives, ended, run.started_at)
    _draw_rate(rate, ended, run)
    served = [outcome for outcome in ended if outcome.is_served]
    _draw_cumulative(ttft, (o.ttft_s for o in served), "time to first token, ms")
    _draw_cumulative(gap, (o.inter_token_s for o in served), "inter-token latency, ms")
    figure.suptitle(title, x=0.01, ha="left", color=INK)
    figure.savefig(path, dpi=120)


def _draw_lives(axes: Axes, outcomes: Sequence[Outcome], zero: float) -> None:
    """A line each: waiting for the first text, then receiving it."""
    for row, outcome in enumerate(outcomes):
        first = outcome.message_times[0] if outcome.message_times else outcome.ended_at
        colour = ACCENT if outcome.is_served else BAD
        axes.hlines(row, outcome.planned_at - zero, first - zero, color=SOFT, lw=1)
        axes.hlines(row, first - zero, outcome.ended_at - zero, color=colour, lw=1)
    axes.set(title="requests: waiting, then receiving", xlabel="s", ylabel="request")


def _draw_rate(axes: Axes, outcomes: Sequence[Outcome], run: Run) -> None:
    """Tokens per second over the run, each stream's tokens spread over its messages."""
    times, weights = [], []
    for outcome in outcomes:
        share = outcome.output_tokens / max(1, len(outcome.message_times))
        times += [at - run.started_at for at in outcome.message_times]
        weights += [share] * len(outcome.message_times)
    bins = min(100, max(10, int(run.wall_s)))
    width = run.wall_s / bins or 1.0
    scaled = [weight / width for weight in weights]
    axes.hist(times, bins=bins, range=(0, run.wall_s or 1), weights=scaled, color=ACCENT)
    axes.set(title="output tokens/s", xlabel="s")


def _draw_cumulative(axes: Axes, seconds: Iterable[float | None], label: str) -> None:
    values = sorted(value * 1e3 for value in seconds if value is not None)
    shares = [(rank + 1) / len(values) for rank in range(len(values))]
    axes.step(values, shares, where="post", color=ACCENT)
    axes.set(title=label, ylabel="share of requests", ylim=(0, 1.02))
    axes.grid(color="#e5e5e5")
