"""`noria batch`: a file of requests, answered into another."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from noria.batch.journal import Journal, JournalError, open_journal
from noria.batch.lines import Line, LineError, read_lines
from noria.batch.work import Batch, BatchStoppedError, Patience, Progress
from noria.client.async_client import AsyncClient
from noria.client.result import ChatResult
from noria.service.limits import MIN_PRIORITY
from noria.v1 import chat_pb2

_PRICE = click.FloatRange(min=0)
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
@click.argument("source", metavar="IN.JSONL", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("results", metavar="OUT.JSONL", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--address", default="localhost:50051", show_default=True, help="The server's.")
@click.option("--concurrency", default=64, show_default=True, type=click.IntRange(1, 4096), help="Requests at a time.")
@click.option("--priority", default=MIN_PRIORITY, show_default=True, help="Where a line names none.")
@click.option("--deadline", default=3600.0, show_default=True, type=click.FloatRange(min=1), help="Of each request, in seconds.")
@click.option("--give-up-after", default=600.0, show_default=True, type=click.FloatRange(min=0), help="Seconds without any answer.")
@click.option("--input-price", default=0.0, type=_PRICE, help="Of a million prompt tokens.")
@click.option("--cached-price", type=_PRICE, help="Of those from the prefix cache; else the same.")
@click.option("--output-price", default=0.0, type=_PRICE, help="Of a million output tokens.")
def batch(
    source: Path,
    results: Path,
    address: str,
    concurrency: int,
    priority: int,
    deadline: float,
    give_up_after: float,
    input_price: float,
    cached_price: float | None,
    output_price: float,
) -> None:
    """Answer every request of IN.JSONL into OUT.JSONL, a line for a line, in any order.

    A line is a JSON object with `messages` or a `prompt`, an `id` if it likes, and options as
    in the Python client. Run again after an interruption, it goes on where it stood; no line
    is answered into the file twice.
    """
    prices = Prices(input_price, input_price if cached_price is None else cached_price, output_price)
    progress = Progress()
    try:
        with open_journal(results) as journal:
            progress.total = _checked(source, priority, journal)
            work = _work(source, address, concurrency, priority, deadline, give_up_after, journal, progress)
            with _shown(progress, prices):
                asyncio.run(work)
    except (LineError, JournalError, BatchStoppedError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        click.echo(_told(progress, prices), err=True)
