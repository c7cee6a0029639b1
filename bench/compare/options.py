"""What the comparisons are asked and how they tell, alike."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from bench.compare.engine import BLOCK_SIZE, BenchedEngine
from noria.cli.model_source import DEFAULT_MODEL, resolve_model

F = TypeVar("F", bound=Callable[..., Any])
_FILE = click.Path(dir_okay=False, path_type=Path)
_CORES = len(os.sched_getaffinity(0))


def on_a_model(command: F) -> F:
    """For those that run a model in this process."""
    command = click.option("--cpu-threads", default=_CORES, show_default=True)(command)
    return click.option("--model", default=DEFAULT_MODEL, show_default=True)(command)


def with_outputs(command: F) -> F:
    """Where the figures go besides the terminal."""
    command = click.option("--plot", "plot_path", type=_FILE, help="A PNG.")(command)
    return click.option("--json", "json_path", type=_FILE)(command)


def benched_engine(
    model: str, cpu_threads: int, *, tokens: int, max_model_len: int
) -> BenchedEngine:
    """An engine with room for so many tokens of keys and values."""
    path = resolve_model(model, lambda text: click.echo(text, err=True)).path
    try:
        return BenchedEngine(path, -(-tokens // BLOCK_SIZE), max_model_len, cpu_threads)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


def tell(table: Table, figures: dict[str, Any], json_path: Path | None) -> None:
    """Print the table, with what else ran; write the figures."""
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    table.caption = f"{table.caption}\n{load}" if table.caption else load
    Console().print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(figures | {"load": load}, indent=2) + "\n")


def new_table(title: str, *columns: str) -> Table:
    """The first column on the left, figures on the right."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=not place)
    return table


def words(count: int, seed: int) -> tuple[int, ...]:
    """Token ids of a prompt that no other seed's begins like."""
    return tuple(100 + (seed * 7919 + at * 31) % 20_000 for at in range(count))
