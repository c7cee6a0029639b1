"""`noria bench sweep`: what a larger batch gives, and what each stream pays for it."""

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import noria
from bench.load.arrivals import ClosedLoop
from bench.load.runner import Run
from bench.load.summary import Objective, Summary, summarize
from bench.load.workload import Workload
from bench.measure import Server, measured
from bench.options import LENGTHS
from bench.served import serving

SIZES = (1, 2, 4, 8, 16, 32)
COLUMNS = ("batch", "tokens/s", "gain", "TTFT p50", "p99", "inter-token p50", "p99")


@dataclass(frozen=True, slots=True)
class Point:
    """A batch size (`max_num_seqs`) and what was measured with it."""

    size: int
    summary: Summary


@click.command()
@click.option("--size", "sizes", multiple=True, default=SIZES, type=click.IntRange(1, 4096))
@click.option("--prompt-words", default="64", show_default=True, type=LENGTHS)
@click.option("--output-tokens", default="64", show_default=True, type=LENGTHS)
@click.option("--rounds", default=2, show_default=True, type=click.IntRange(1), help="Of a batch.")
@click.option("--target-itl", type=click.FloatRange(min=0), help="Inter-token p99 to keep, in ms.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="A PNG.")
@click.argument("flags", nargs=-1)
def sweep(
    sizes: Sequence[int],
    rounds: int,
    target_itl: float | None,
    json_path: Path | None,
    plot_path: Path | None,
    flags: Sequence[str],
    **lengths: Any,
) -> None:
    """Serve with batches of 1, 2, 4 ... sequences, each kept full, and compare.

    FLAGS, after --, go to `noria up`: --model, --script and the like.
    """
    console = Console(stderr=True)
    points = [_measure(size, rounds, flags, lengths, console) for size in sorted(set(sizes))]
    Console().print(sweep_table(points))
    click.echo(advice(points, target_itl))
    if json_path is not None:
        told = [{"max_num_seqs": point.size, **point.summary.to_json()} for point in points]
        json_path.write_text(json.dumps(told, indent=2) + "\n")
    if plot_path is not None:
        from bench.sweep_plot import plot_sweep

        plot_sweep(points, plot_path)


def _measure(
    size: int, rounds: int, flags: Sequence[str], lengths: dict[str, Any], console: Console
) -> Point:
    """As many requests at a time as keep the batch full, without a line that TTFT would measure."""
    here = Path(noria.__file__).parent.parent
    workload = Workload(**lengths, seed=size)
    run = Run()
    with serving(here, "--max-num-seqs", str(size), *flags) as served:
        server = Server(served.address, (served.api_key,), "", 0.0)
        count = max(4, rounds * size)
        asyncio.run(measured(run, server, workload, ClosedLoop(size), count, 1, console))
    summary = summarize(run, Objective())
    if summary.faults or set(summary.ended) != {"SERVED"}:
        raise click.ClickException(f"not everything was served: {summary.ended} {summary.faults}")
    return Point(size, summary)


def sweep_table(points: Sequence[Point]) -> Table:
    """A line per batch size; gains are against the smallest."""
    table = Table(title="one worker, its batch kept full", title_justify="left")
    for name in (
        "batch",
        "output tokens/s",
        "gain",
        "TTFT p50",
        "p99",
        "inter-token p50",
        "p99 ms",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    base = points[0].summary.output_tokens_per_s
    for point in points:
        told = point.summary
        latencies = (told.ttft_ms, told.inter_token_ms)
        figures = [value for of in latencies for value in (of.p50, of.p99)]
        table.add_row(
            str(point.size),
            f"{told.output_tokens_per_s:,.1f}",
            f"{told.output_tokens_per_s / base:.1f}x",
            *(f"{figure:,.1f}" for figure in figures),
        )
    table.caption = f"milliseconds; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return table


def advice(points: Sequence[Point], target_itl: float | None) -> str:
    """The largest size that keeps the target, in a sentence."""
    if target_itl is None:
        best = max(points, key=lambda point: point.summary.output_tokens_per_s)
        return f"most tokens/s with --max-num-seqs {best.size}"
    kept = [point for point in points if point.summary.inter_token_ms.p99 <= target_itl]
    if not kept:
        least = min(points, key=lambda point: point.summary.inter_token_ms.p99)
        p99 = least.summary.inter_token_ms.p99
        return f"no batch keeps {target_itl:g} ms a token; --max-num-seqs {least.size}: {p99:.1f}"
    largest = max(kept, key=lambda point: point.size)
    return f"the largest that keeps {target_itl:g} ms a token: --max-num-seqs {largest.size}"
