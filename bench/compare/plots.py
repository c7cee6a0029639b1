"""The comparisons as pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from bench.load.plots import ACCENT, BAD, INK, SOFT, new_figure
from bench.load.runner import Run

if TYPE_CHECKING:
    from bench.compare.batching import Contest
    from bench.compare.chunks import Budgeted
    from bench.compare.drive import Driven
    from bench.compare.one_by_one import Way

_GRID = "#e5e5e5"
_COLOURS = (BAD, "#ee9b00", SOFT, ACCENT)


def plot_one_by_one(single: "Way", batch: "Way", path: Path) -> None:
    """Write a PNG: seconds for whole requests, tokens/s of decode alone."""
    figure = new_figure(8, 2.4)
    whole, decode = figure.subplots(1, 2)
    names = [single.name, batch.name]
    _bars(whole, names, [single.wall_s, batch.wall_s], "whole requests, s", "{:.2f}")
    rates = [single.decode_tokens_per_s, batch.decode_tokens_per_s]
    _bars(decode, names, rates, "decode alone, tokens/s", "{:.0f}")
    figure.suptitle("A step reads the weights once for all of its rows", x=0.01, ha="left")
    figure.savefig(path, dpi=120)


def plot_batching(contests: "Sequence[Contest]", path: Path) -> None:
    """Write a PNG: tokens/s measured and predicted, times to the first token, rows over time."""
    figure = new_figure(10, 6)
    grid = figure.add_gridspec(2, 2)
    rate, waits = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    rows = figure.add_subplot(grid[1, :])
    names = [contest.name for contest in contests]
    measured = [contest.driven.tokens_per_s for contest in contests]
    _bars(rate, names, measured, "tokens/s; | predicted by step times", "{:.0f}")
    guesses = [contest.predicted.tokens_per_s for contest in contests]
    rate.scatter(guesses, range(len(guesses)), marker="|", s=300, color=INK)
    for contest, colour in zip(contests, _COLOURS, strict=False):
        _draw_cumulative(waits, [s.ttft_s for s in contest.driven.served], contest.name, colour)
        times = [step.ended_at for step in contest.driven.steps]
        useful = [step.useful for step in contest.driven.steps]
        rows.step(times, useful, where="pre", color=colour, lw=1, label=contest.name)
    waits.set(title="time to first token, s", ylabel="share of requests", xlim=0)
    rows.set(title="sequences in a step that still owe a token", xlabel="s", ylim=0)
    rows.legend(frameon=False, ncols=4)
    figure.suptitle("Who may join a batch, and when", x=0.01, ha="left")
    figure.savefig(path, dpi=120)


def plot_prefix(told: "Mapping[str, Driven]", path: Path) -> None:
    """Write a PNG: times to the first token, and when all was done."""
    figure = new_figure(8, 2.8)
    waits, whole = figure.subplots(1, 2)
    for (name, driven), colour in zip(told.items(), (BAD, ACCENT), strict=True):
        _draw_cumulative(waits, [s.ttft_s for s in driven.served], name, colour)
    waits.set(title="time to first token, s", ylabel="share of requests", xlim=0)
    waits.legend(frameon=False)
    _bars(whole, list(told), [d.wall_s for d in told.values()], "until all was done, s", "{:.1f}")
    figure.suptitle("A prefix that all share, computed by each or once", x=0.01, ha="left")
    figure.savefig(path, dpi=120)


def plot_chunks(told: "Sequence[Budgeted]", path: Path) -> None:
    """Write a PNG: the streams' longest gap against the long prompt's time to first token."""
    figure = new_figure(7, 3.6)
    axes = figure.subplots()
    gaps = [run.figures()["gap_max_ms"] for run in told]
    waits = [run.figures()["long_ttft_s"] for run in told]
    axes.plot(waits, gaps, marker="o", color=ACCENT)
    for run, x, y in zip(told, waits, gaps, strict=True):
        axes.annotate(f"{run.budget}", (x, y), (5, 5), textcoords="offset points", color=INK)
    axes.set(xlabel="the long prompt's time to first token, s", ylim=0)
    axes.set(ylabel="longest gap of the others, ms", title="by positions a step")
    axes.grid(color=_GRID)
    figure.suptitle("A long prompt beside running streams", x=0.01, ha="left")
    figure.savefig(path, dpi=120)


def plot_routing(told: Mapping[str, Run], path: Path) -> None:
    """Write a PNG: the distribution of times to the first token."""
    figure = new_figure(7, 3.6)
    axes = figure.subplots()
    for (name, run), colour in zip(told.items(), (BAD, ACCENT), strict=True):
        waits = [outcome.ttft_s for outcome in run.outcomes if outcome.ttft_s is not None]
        _draw_cumulative(axes, waits, name, colour)
    axes.set(xscale="log", xlabel="time to first token, s", ylabel="share of requests")
    axes.legend(frameon=False)
    figure.suptitle("One in ten outputs is very long: where the others wait", x=0.01, ha="left")
    figure.savefig(path, dpi=120)


def _bars(axes: Axes, names: list[str], values: list[float], title: str, form: str) -> None:
    bars = axes.barh(names, values, color=_COLOURS[-len(names) :])
    axes.bar_label(bars, [form.format(value) for value in values], padding=3, color=INK)
    axes.invert_yaxis()
    axes.set(title=title)
    axes.margins(x=0.15)


def _draw_cumulative(axes: Axes, seconds: Sequence[float], label: str, colour: str) -> None:
    values = sorted(seconds)
    shares = [(rank + 1) / len(values) for rank in range(len(values))]
    axes.step(values, shares, where="post", color=colour, label=label)
    axes.set(ylim=(0, 1.02))
    axes.grid(color=_GRID)
