"""Where the time goes from `noria up` to ready.

Runs the command several times, hears the services' own events, and prints for each process the
medians of its stages; then what the imports cost, and what reading the weights does.

    python -m bench.startup [--rounds 5] [--model ...] [any further option of `noria up`]
"""

import contextlib
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

TARGET_S = 6.0
_BAR = 40
_LIMIT_S = 120
_LINE = re.compile(r"(?P<child>(?:router|tokenizer|worker)(?: \d+)?): (?P<event>\w+) ?(?P<rest>.*)")
_STAGE = re.compile(r"stage=(.+?) done=(\d+) total=(\d+)")
_MODULES = ("torch", "numpy", "grpc", "structlog", "prometheus_client", "gguf", "tokenizers")
_SERVICES = {
    "command": "noria.cli.main",
    "router": "router.__main__",
    "tokenizer": "tokenizer_svc.__main__",
    "worker": "worker.__main__",
    "worker, engine": "worker.build",
}


@dataclass
class Run:
    """One start: seconds since the command, by process and stage."""

    marks: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    ready_s: float = 0.0
    cpu_s: float = 0.0

    def mark(self, process: str, at: float, stage: str) -> None:
        """From `at` on the process is in the stage; the first mark of a stage counts."""
        told = self.marks.setdefault(process, [])
        if stage not in (name for _, name in told):
            told.append((at, stage))

    def stages(self) -> Iterator[tuple[str, str, float, float]]:
        """(process, stage, begun, seconds) until the process is ready."""
        for process, marks in self.marks.items():
            ordered = sorted(marks)
            for (begun, stage), (ended, _) in itertools.pairwise(ordered):
                yield process, stage, begun, ended - begun


def measured(arguments: tuple[str, ...]) -> Run:
    """Start, wait until the command says that it serves, stop. Raises RuntimeError."""
    command = [sys.executable, "-m", "noria.cli", "up", "--port", "0", "--metrics-port", "0"]
    begun, run = time.monotonic(), Run()
    with subprocess.Popen(
        [*command, "--verbose", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        run.mark("command", 0.0, "interpreter, imports, model's hash, key")
        try:
            _listen(process, run, begun)
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_LIMIT_S)
    return run


def _listen(process: "subprocess.Popen[str]", run: Run, begun: float) -> None:
    lines: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        at = time.monotonic() - begun
        lines.append(line)
        _births(process.pid, run, begun)
        take_line(run, line, at)
        if line.startswith("ready in"):
            run.ready_s, run.cpu_s = at, _cpu_s(process.pid)
            run.mark("command", at, "ready")
            return
    raise RuntimeError("noria up ended before it was ready:\n" + "".join(lines[-20:]))


def take_line(run: Run, line: str, at: float) -> None:
    """Mark the stage that a line of the command, heard at `at`, begins."""
    match = _LINE.match(line)
    if match is None:
        return
    child, event = match["child"], match["event"]
    if event == "progress" and (stage := _STAGE.search(match["rest"])):
        run.mark(child, at, stage[1])
        if stage[2] == stage[3]:
            run.mark(child, at, f"after {stage[1]}")
    elif event == "listening" and len(run.marks.get(child, ())) < 2:
        # Services load while they begin to listen: only one that loads nothing has the stage.
        run.mark(child, at, "listening")
    elif event == "ready":
        run.mark(child, at, "ready")


def _cpu_s(pid: int) -> float:
    """Processor seconds of the command and its children so far: busy cores hardly change it."""
    ticks = 0
    for one in (str(pid), *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += int(stat[11]) + int(stat[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _births(pid: int, run: Run, begun: float) -> None:
    """When the children began, from the kernel, to a clock tick (10 ms)."""
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - (time.monotonic() - begun)
    ticks = os.sysconf("SC_CLK_TCK")
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            name = _name(Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"))
            stat = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            if name:
                started = int(stat[19]) / ticks - since_boot
                run.mark("command", started, "children start")
                run.mark(name, started, "interpreter and imports")


def _name(argv: list[bytes]) -> str:
    modules = {b"router": "router", b"tokenizer_svc": "tokenizer", b"worker": "worker"}
    return next((modules[part] for part in argv if part in modules), "")


def import_times(module: str) -> dict[str, float]:
    """Seconds that a module's import takes, with what each known package takes of it."""
    command = [sys.executable, "-X", "importtime", "-c", f"import {module}"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    taken: dict[str, float] = {}
    for line in told.splitlines():
        cells = [cell.strip() for cell in line.removeprefix("import time:").split("|")]
        if len(cells) == 3 and cells[1].isdigit() and cells[2] in (module, *_MODULES):
            taken[cells[2]] = int(cells[1]) / 1e6
    return taken


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(rounds: int, arguments: tuple[str, ...]) -> None:
    """Print where the time goes; further ARGUMENTS go to `noria up`."""
    console = Console(width=110, highlight=False)
    runs = []
    for number in range(rounds + 1):
        before = os.getloadavg()[0]
        run = measured(arguments)
        told = "warms the disk" if number == 0 else "counted"
        console.print(
            f"start {number}: {run.ready_s:.2f} s, processor {run.cpu_s:.2f} s, "
            f"load before {before:.1f}, {told}"
        )
        runs += [run] if number else []
    ready = statistics.median(run.ready_s for run in runs)
    verdict = "below" if ready < TARGET_S else "NOT below"
    cpu = statistics.median(run.cpu_s for run in runs)
    console.print(
        f"\nmedian of {rounds}: ready after {ready:.2f} s, {verdict} {TARGET_S:g} s; all processes "
        f"took {cpu:.2f} s of processor time until then\n"
    )
    console.print(_stage_table(runs, ready))
    console.print(_import_table(rounds))


def stage_medians(runs: list[Run]) -> dict[tuple[str, str], tuple[float, float]]:
    """(process, stage) -> medians of when it began and of what it took, s."""
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run in runs:
        for process, stage, begun, seconds in run.stages():
            taken.setdefault((process, stage), []).append((begun, seconds))
    return {
        key: (statistics.median(b for b, _ in values), statistics.median(s for _, s in values))
        for key, values in taken.items()
    }


def _stage_table(runs: list[Run], whole: float) -> Table:
    table = Table(box=box.SIMPLE, title="medians, s", title_justify="left")
    for name in ("process", "stage", "from", "takes", ""):
        table.add_column(name, justify="right" if name in ("from", "takes") else "left")
    for (process, stage), (begun, seconds) in stage_medians(runs).items():
        first, length = (round(_BAR * value / whole) for value in (begun, seconds))
        bar = " " * first + "█" * max(length, 1)
        table.add_row(process, stage, f"{begun:.2f}", f"{seconds:.2f}", bar)
    return table


def _import_table(rounds: int) -> Table:
    table = Table(box=box.SIMPLE, title="imports alone, medians, s", title_justify="left")
    table.add_column("process")
    for name in ("all", *_MODULES):
        table.add_column(name, justify="right")
    for process, module in _SERVICES.items():
        each = [import_times(module) for _ in range(rounds)]
        cells = [
            statistics.median(times.get(name, 0.0) for times in each)
            for name in (module, *_MODULES)
        ]
        table.add_row(process, *(f"{seconds:.2f}" if seconds else "" for seconds in cells))
    return table


if __name__ == "__main__":
    main()
