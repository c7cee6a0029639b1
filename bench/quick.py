"""`noria bench quick`: is this copy slower than the commit before it?

Both serve at the same time and are asked in turn, since nothing else makes figures of a shared
computer comparable: whatever else runs meets both alike.
"""

import asyncio
import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
from rich.console import Console
from rich.table import Table

from bench.load.arrivals import ClosedLoop
from bench.load.distributions import parse_lengths
from bench.load.runner import Run
from bench.load.summary import Objective, Summary, summarize
from bench.load.workload import Workload
from bench.measure import Server, measured
from bench.served import Served, serving

# A loss beyond this share is a defect.
TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a summary; of two values the better one is higher, or lower."""

    name: str
    value: Callable[[Summary], float]
    higher_is_better: bool

    def gain(self, old: float, new: float) -> float:
        """How many times as good the new value is."""
        worse, better = (old, new) if self.higher_is_better else (new, old)
        return better / worse if worse else float("nan")


FIGURES = (
    Figure("output tokens/s", lambda summary: summary.output_tokens_per_s, True),
    Figure("TTFT p50, ms", lambda summary: summary.ttft_ms.p50, False),
    Figure("inter-token p50, ms", lambda summary: summary.inter_token_ms.p50, False),
)


@click.command()
@click.option("--old", default=None, help="A revision (default: the last one that differs).")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--concurrency", "levels", multiple=True, default=(1, 32), type=click.IntRange(1))
@click.option("--output-tokens", default=64, show_default=True, type=click.IntRange(2))
@click.argument("flags", nargs=-1)
def quick(
    old: str | None, rounds: int, levels: Sequence[int], output_tokens: int, flags: Sequence[str]
) -> None:
    """Compare this working copy with the commit before it, in turn, on the demo model.

    FLAGS, after --, go to `noria up` on both sides.
    """
    here = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel"))
    revision = old or _last_different(here)
    console = Console(stderr=True)
    with (
        checked_out(here, revision) as there,
        serving(there, *flags) as before,
        serving(here, *flags) as after,
    ):
        sides = (before, after)
        _ask(sides[0], 2, 8, 900, console), _ask(sides[1], 2, 8, 900, console)
        results = {level: _rounds(sides, level, rounds, output_tokens, console) for level in levels}
    Console().print(comparison(results, _git(here, "log", "-1", "--format=%h %s", revision)))


def _rounds(
    sides: Sequence[Served], level: int, rounds: int, output_tokens: int, console: Console
) -> list[tuple[Summary, Summary]]:
    """(old, new) of each round; who goes first changes from round to round."""
    pairs = []
    for number in range(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        told = {side: _ask(sides[side], level, output_tokens, number, console) for side in order}
        pairs.append((told[0], told[1]))
    return pairs


def _ask(
    side: Served, concurrency: int, output_tokens: int, seed: int, console: Console
) -> Summary:
    workload = Workload(
        prompt_words=parse_lengths("64"),
        output_tokens=parse_lengths(str(output_tokens)),
        seed=1000 * concurrency + seed,
    )
    server = Server(side.address, (side.api_key,), "", 0.0)
    count = 4 if concurrency == 1 else 2 * concurrency
    run = Run()
    asyncio.run(measured(run, server, workload, ClosedLoop(concurrency), count, 0, console))
    summary = summarize(run, Objective())
    if summary.faults or set(summary.ended) != {"SERVED"}:
        raise click.ClickException(f"not everything was served: {summary.ended} {summary.faults}")
    return summary


def comparison(results: dict[int, list[tuple[Summary, Summary]]], old: str) -> Table:
    """Medians of both sides, and the gain: its median, and the worst and best round."""
    table = Table(title=f"this copy against {old}", title_justify="left")
    for name in ("at once", "figure", "before", "now", "gain", "rounds"):
        table.add_column(name, no_wrap=True)
    for level, pairs in results.items():
        for figure in FIGURES:
            table.add_row(str(level), figure.name, *_cells(figure, pairs))
    one_minute = os.getloadavg()[0]
    table.caption = f"load average {one_minute:.1f} on {os.cpu_count()} cores; rounds: {len(pairs)}"
    return table


def _cells(figure: Figure, pairs: list[tuple[Summary, Summary]]) -> list[str]:
    values = [(figure.value(old), figure.value(new)) for old, new in pairs]
    gains = sorted(figure.gain(old, new) for old, new in values)
    gain = median(gains)
    told = f"{gain:.2f}x" if gain >= 1 - TOLERANCE else f"[red]{gain:.2f}x a loss[/red]"
    before, now = (median(side) for side in zip(*values, strict=True))
    return [f"{before:,.1f}", f"{now:,.1f}", told, f"{gains[0]:.2f} to {gains[-1]:.2f}"]


@contextlib.contextmanager
def checked_out(repository: Path, revision: str) -> Iterator[Path]:
    """The sources of a revision in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="noria-") as parent:
        folder = Path(parent) / "old"
        _git(repository, "worktree", "add", "--detach", str(folder), revision)
        try:
            yield folder
        finally:
            _git(repository, "worktree", "remove", "--force", str(folder))


def _last_different(repository: Path) -> str:
    """HEAD if the working copy differs from it, else the commit before it."""
    return "HEAD" if _git(repository, "status", "--porcelain") else "HEAD~1"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise click.ClickException(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
