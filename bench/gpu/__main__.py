"""`python -m bench.gpu`: prove and measure the worker on a GPU, in one go and one table.

Needs Python 3.11, torch 2.11, triton 3.6, numpy and safetensors, and nothing else. With
`--device cpu --tiny` the same script runs on a CPU, its kernels interpreted.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.gpu.isolation import Task, isolated
from bench.gpu.rows import FAILED, SKIPPED, Ceilings, Row, line, table
from bench.gpu.setting import Setting
from worker.attention.selection import GPU_BACKENDS

_PARTS, _MODELS = "bench.gpu.parts", "bench.gpu.models"
# In the order of what is worth most, should the time run out.
TASKS = (
    Task("found", _PARTS, "found", 10),
    Task("ceilings", _PARTS, "ceilings", 10),
    Task("conformance", _PARTS, "conformance_of", 45, ("triton",)),
    Task("graphs", _MODELS, "graphs", 20),
    Task("engine", _MODELS, "engine", 60),
    Task("layer", _PARTS, "layer", 30),
    *(
        Task("conformance", _PARTS, "conformance_of", 20, (name,))
        for name in GPU_BACKENDS
        if name != "triton"
    ),
)
Run = Callable[[Task, str, bool, float], Iterator[Row]]


def here(task: Task, device: str, tiny: bool, seconds: float) -> Iterator[Row]:
    """In this process; a part that raises ends alone, one that kills takes all."""
    try:
        yield from task.rows(Setting.of(device, tiny, seconds))
    except Exception as error:
        yield Row(task.name, "the rest", FAILED, note=f"{type(error).__name__}: {error}"[:200])


def run_all(
    tasks: Sequence[Task], device: str, tiny: bool, seconds: float, run: Run
) -> Iterator[Row]:
    """Every task's rows, each task within its own time and all of them within `seconds`."""
    deadline = time.monotonic() + seconds
    for task in tasks:
        left = deadline - time.monotonic()
        if left <= 0:
            name = " ".join((task.function, *task.arguments))
            yield Row(task.name, name, SKIPPED, note=f"the {seconds:.0f} s are over")
            continue
        yield from run(task, device, tiny, min(task.seconds, left))


def main(arguments: Sequence[str] | None = None, run: Run = isolated) -> int:
    """Print each row when it is there, then the table; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="as small as can be, to try the script")
    parser.add_argument("--seconds", type=float, default=210.0, help="nothing begins after them")
    parser.add_argument("--only", action="append", default=[], help="parts of this name")
    parser.add_argument("--out", type=Path, help="write the table into this file too")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        # Read when the kernels are first imported, here or in a part's own process.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    tasks = [task for task in TASKS if not options.only or task.name in options.only]
    rows: list[Row] = []
    for row in run_all(tasks, options.device, options.tiny, options.seconds, run):
        rows.append(row)
        print(line(row, Ceilings.among(rows)), flush=True)
    told = table(rows)
    print("\n" + told)
    if options.out is not None:
        options.out.write_text(told + "\n")
    return 1 if any(row.outcome == FAILED for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
