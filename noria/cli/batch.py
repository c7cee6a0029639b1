"""`noria batch`: a file of requests, answered into another."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from noria.batch.journal import Journal, JournalError, open_journal
from noria.batch.lines import Line, read_lines
from noria.batch.work import Batch, BatchStoppedError, Patience, Progress
from noria.client.async_client import AsyncClient
from noria.client.result import ChatResult
from noria.client.tls import Tls
from noria.service.limits import MIN_PRIORITY

_INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUTPUT = click.Path(dir_okay=False, path_type=Path)
_AT_ONCE = click.IntRange(1, 4096)
_SECONDS = click.FloatRange(min=1)
_PRICE = click.FloatRange(min=0)
_GIVE_UP = "Seconds without any answer."
_BAR = 30


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a million tokens each, in whatever money."""

    input: float
    cached: float
    output: float

    def cost(self, progress: Progress) -> float:
        fresh = progress.input_tokens - progress.cached_tokens
        of_input = fresh * self.input + progress.cached_tokens * self.cached
        return (of_input + progress.output_tokens * self.output) / 1e6


@click.command()
@click.argument("source", metavar="IN.JSONL", type=_INPUT)
@click.argument("results", metavar="OUT.JSONL", type=_OUTPUT)
@click.option("--address", default="localhost:50051", show_default=True, help="The server's.")
@click.option("--concurrency", default=64, show_default=True, type=_AT_ONCE, help="At a time.")
@click.option("--priority", default=MIN_PRIORITY, show_default=True, help="Of lines without one.")
@click.option("--deadline", default=3600.0, show_default=True, type=_SECONDS, help="Of a request.")
@click.option("--give-up-after", default=600.0, show_default=True, type=_SECONDS, help=_GIVE_UP)
@click.option("--input-price", default=0.0, type=_PRICE, help="Of a million prompt tokens.")
@click.option("--cached-price", type=_PRICE, help="Of those from the prefix cache; else the same.")
@click.option("--output-price", default=0.0, type=_PRICE, help="Of a million output tokens.")
@click.pass_obj
def batch(
    tls: Tls | None,
    /,
    source: Path,
    results: Path,
    priority: int,
    input_price: float,
    cached_price: float | None,
    output_price: float,
    **given: Any,
) -> None:
    """Answer every request of IN.JSONL into OUT.JSONL, a line for a line, in any order.

    A line is a JSON object with `messages` or a `prompt`, an `id` if it likes, and options as
    in the Python client. Run again after an interruption, it goes on where it stood; no line
    is answered into the file twice.
    """
    cached = input_price if cached_price is None else cached_price
    prices, progress = Prices(input_price, cached, output_price), Progress()
    try:
        with open_journal(results) as journal:
            progress.total = checked_lines(source, priority, journal)
            with _shown(progress, prices):
                asyncio.run(
                    _answer_all(read_lines(source, priority), journal, progress, tls, **given)
                )
    except KeyboardInterrupt:
        raise click.ClickException("interrupted; the same command goes on from here") from None
    except (BatchStoppedError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(_told(progress, prices, time.monotonic() - progress.begun), err=True)


def checked_lines(source: Path, priority: int, journal: Journal) -> int:
    """The number of requests, all of them well-formed and those that are done the same.

    Raises LineError, JournalError.
    """
    numbers = set()
    for line in read_lines(source, priority):
        done_as = journal.done.get(line.number, line.id)
        if done_as != line.id:
            raise JournalError(f"line {line.number}: its id is not that of its result")
        numbers.add(line.number)
    foreign = min(journal.done.keys() - numbers, default=None)
    if foreign is not None:
        raise JournalError(f"line {foreign}: it has a result, and is no request")
    return len(numbers)


async def _answer_all(
    lines: Iterator[Line],
    journal: Journal,
    progress: Progress,
    tls: Tls | None,
    *,
    address: str,
    concurrency: int,
    deadline: float,
    give_up_after: float,
) -> None:
    patience = Patience(give_up_after, time.monotonic)
    async with AsyncClient(address, timeout=deadline, tls=tls) as client:

        async def ask(line: Line) -> ChatResult:
            if line.messages is not None:
                return await client.chat(line.messages, **line.options)
            return await client.complete(line.prompt or "", **line.options)

        await Batch(ask, journal, progress, patience).run(lines, concurrency)


@contextlib.contextmanager
def _shown(progress: Progress, prices: Prices) -> Iterator[None]:
    """A line that moves while the block runs, where somebody looks."""
    progress.begun = time.monotonic()

    def draw() -> Text:
        return Text(_told(progress, prices, time.monotonic() - progress.begun))

    with Live(get_renderable=draw, console=Console(stderr=True), transient=True):
        yield


def _told(progress: Progress, prices: Prices, elapsed_s: float) -> str:
    finished = progress.skipped + progress.done
    filled = _BAR * finished // max(1, progress.total)
    cost = prices.cost(progress)
    parts = [
        f"{'━' * filled}{'╌' * (_BAR - filled)} {finished}/{progress.total} lines",
        f"{progress.skipped} of them before" if progress.skipped else "",
        f"{progress.failed} with an error" if progress.failed else "",
        f"{progress.output_tokens / max(elapsed_s, 1e-3):,.0f} tokens/s",
        f"{progress.input_tokens:,} in, {progress.output_tokens:,} out",
        f"cost {cost:,.4f}" if cost else "",
        f"{elapsed_s:.0f} s",
    ]
    return ", ".join(part for part in parts if part)
