"""A run while it goes on, and its figures as a table."""

import asyncio
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bench.load.runner import Run
from bench.load.summary import Percentiles, Summary

_REFRESH_S = 0.25
_WINDOW = 8
_BAR = 30


async def show_progress(run: Run, console: Console, clock: Callable[[], float]) -> None:
    """Draw the run until cancelled; where nobody looks, a line now and then."""
    recent: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
    with Live(console=console, refresh_per_second=1 / _REFRESH_S, transient=True) as live:
        while True:
            now = clock()
            messages = sum(len(outcome.message_times) for outcome in run.outcomes)
            recent.append((now, messages))
            live.update(Text(_progress_line(run, now, recent)))
            await asyncio.sleep(_REFRESH_S)


def _progress_line(run: Run, now: float, recent: deque[tuple[float, int]]) -> str:
    ended, total = run.num_ended, run.num_requests
    filled = _BAR * ended // max(1, total)
    (first_at, first), (last_at, last) = recent[0], recent[-1]
    rate = (last - first) / (last_at - first_at) if last_at > first_at else 0.0
    bar = "━" * filled + "╌" * (_BAR - filled)
    in_flight = len(run.outcomes) - ended
    return (
        f"{bar} {ended}/{total} ended, {in_flight} in flight, {rate:,.0f} messages/s, "
        f"{now - run.started_at:.0f} s"
    )


def summary_table(summary: Summary, title: str) -> Table:
    """The figures for people."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    ended = ", ".join(f"{count} {how}" for how, count in summary.ended.items()) or "none"
    table.add_row("requests", f"{ended}; {summary.wall_s:.1f} s in all")
    for fault, count in summary.faults.items():
        table.add_row("faulty", f"[red]{count} served streams: {fault}[/red]")
    table.add_row(
        "throughput",
        f"{summary.output_tokens_per_s:,.1f} output tokens/s, "
        f"{summary.total_tokens_per_s:,.1f} with the prompts', "
        f"{summary.requests_per_s:.2f} requests/s",
    )
    table.add_row("goodput", f"{summary.goodput_per_s:.2f} requests/s within the objective")
    table.add_row("tokens", _tokens(summary))
    table.add_row("time to first token", _milliseconds(summary.ttft_ms))
    table.add_row("inter-token latency", _milliseconds(summary.inter_token_ms))
    table.add_row("between messages", _milliseconds(summary.message_gap_ms))
    table.add_row("end-to-end latency", _milliseconds(summary.end_to_end_ms))
    table.add_row(
        "this generator",
        f"{summary.generator_cpu:.0%} of a core; sent at most "
        f"{summary.generator_late_ms:.1f} ms late",
    )
    return table


def _tokens(summary: Summary) -> str:
    return (
        f"{summary.input_tokens:,} in ({summary.cached_tokens:,} of them cached), "
        f"{summary.output_tokens:,} out, {summary.tokens_per_message:.2f} per message"
    )


def _milliseconds(of: Percentiles) -> str:
    return f"p50 {of.p50:,.1f}   p90 {of.p90:,.1f}   p99 {of.p99:,.1f}   max {of.max:,.1f} ms"
