"""What is shown while the services start: bars on a terminal, plain lines elsewhere."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from noria.cli.supervisor import Event
from noria.plan.kv import cache_sentence

STARTING = "starting"
_LOUD = ("warning", "error", "critical")


class StartView(Protocol):
    """Hears the children's events while they start."""

    def on_event(self, child: str, event: Event) -> None: ...


def _count(event: Event, name: str) -> int:
    value = event.get(name)
    return value if isinstance(value, int) else 0


def _stage(event: Event) -> str:
    """Where a child is, for people; empty for events that say nothing of it."""
    name = str(event.get("event"))
    if name == "progress":
        return str(event.get("stage", ""))
    return {"listening": STARTING, "ready": "ready"}.get(name, "")


_CACHE_FIELDS = ("num_blocks", "block_size", "bytes_per_token", "max_num_seqs", "max_model_len")


def _cache_line(child: str, event: Event) -> str:
    """What a worker that took its KV cache holds; empty for other events."""
    values = [_count(event, name) for name in _CACHE_FIELDS]
    if event.get("event") != "kv_cache" or min(values) < 1:
        return ""
    return f"{child}: {cache_sentence(*values)}"


class BarView:
    """One bar per child."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def on_event(self, child: str, event: Event) -> None:
        if line := _cache_line(child, event):
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        stage = _stage(event)
        if not stage or (stage == STARTING and child in self._tasks):
            return
        if child not in self._tasks:
            self._tasks[child] = self._progress.add_task(child, total=None, stage="")
        task, total = self._tasks[child], _count(event, "total")
        if stage == "ready":
            self._progress.update(task, stage=stage, total=1, completed=1)
        elif total:
            self._progress.update(task, stage=stage, total=total, completed=_count(event, "done"))
        else:
            self._progress.update(task, stage=stage)


class LineView:
    """One line whenever a child comes to another stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stages: dict[str, str] = {}

    def on_event(self, child: str, event: Event) -> None:
        if line := _cache_line(child, event):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        stage = _stage(event)
        # Services load while they begin to listen: either may be told first.
        if not stage or (stage == STARTING and child in self._stages):
            return
        if self._stages.get(child) != stage:
            self._stages[child] = stage
            self._console.print(f"{child}: {stage}", markup=False, highlight=False)


@contextlib.contextmanager
def start_view(console: Console) -> Iterator[StartView]:
    """The view that fits where the console writes."""
    if not console.is_terminal:
        yield LineView(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TextColumn("{task.fields[stage]}"), console=console) as progress:
        yield BarView(progress)


class EventPrinter:
    """Prints what the children log: warnings and worse, or everything."""

    def __init__(self, console: Console, *, everything: bool) -> None:
        self.console = console
        self._everything = everything

    def on_event(self, child: str, event: Event) -> None:
        if not self._everything and event.get("level") not in _LOUD:
            return
        shown = {key: value for key, value in event.items() if key not in ("timestamp", "service")}
        text = " ".join(f"{key}={value}" for key, value in shown.items() if key != "event")
        line = f"{child}: {event.get('event')} {text}".rstrip()
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
