"""Throughput against latency, a point per batch size."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from bench.load.plots import ACCENT, BAD, INK, new_figure

if TYPE_CHECKING:
    from bench.sweep import Point


def plot_sweep(points: "Sequence[Point]", path: Path) -> None:
    """Write a PNG: tokens/s by batch size, and tokens/s against what a stream waits."""
    figure = new_figure(10, 4)
    growth, price = figure.subplots(1, 2)
    sizes = [point.size for point in points]
    rates = [point.summary.output_tokens_per_s for point in points]
    growth.plot(sizes, rates, marker="o", color=ACCENT)
    growth.set_xscale("log", base=2)
    growth.set(xlabel="sequences in the batch", ylabel="output tokens/s", ylim=0)
    growth.set_xticks(sizes, [str(size) for size in sizes])
    growth.grid(color="#e5e5e5")
    _draw_price(price, points, rates)
    figure.suptitle("What a larger batch gives, and what each stream pays", x=0.01, ha="left")
    figure.savefig(path, dpi=120)


def _draw_price(axes: Axes, points: "Sequence[Point]", rates: list[float]) -> None:
    for percentile, colour in (("p50", ACCENT), ("p99", BAD)):
        waits = [getattr(point.summary.inter_token_ms, percentile) for point in points]
        axes.plot(waits, rates, marker="o", color=colour, label=percentile)
    for point, rate in zip(points, rates, strict=True):
        at = (point.summary.inter_token_ms.p50, rate)
        axes.annotate(str(point.size), at, (4, 4), textcoords="offset points", color=INK)
    axes.set(xlabel="ms between the tokens of a stream", ylabel="output tokens/s", ylim=0)
    axes.legend(frameon=False)
    axes.grid(color="#e5e5e5")
