"""A part in a process of its own: what it breaks, hangs or kills is its own too.

After an illegal access a process cannot use its GPU any more, and a kernel that never ends
cannot be interrupted from within.
"""

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench.gpu.rows import FAILED, Row
from bench.gpu.setting import Setting

# A part that has been told the time is given so much more to come to an end.
_GRACE_S = 15.0


@dataclass(frozen=True, slots=True)
class Task:
    """A part by its module and name, so that another process finds it; `arguments` make it.

    It is to take no more than `seconds`.
    """

    name: str
    module: str
    function: str
    seconds: float
    arguments: tuple[str, ...] = ()

    def rows(self, setting: Setting) -> Iterator[Row]:
        from importlib import import_module

        function: Any = getattr(import_module(self.module), self.function)
        part = function(*self.arguments) if self.arguments else function
        yield from part(setting)


def isolated(task: Task, device: str, tiny: bool, seconds: float) -> Iterator[Row]:
    """The task's rows as they come; a row that says how it ended, if it did not end well."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, task, device, tiny, seconds))
    process.start()
    theirs.close()
    deadline = time.monotonic() + seconds + _GRACE_S
    try:
        while ours.poll(max(0.0, deadline - time.monotonic())):
            row = ours.recv()
            if row is None:
                return
            yield row
        yield Row(task.name, "the rest", FAILED, note=f"hung after {seconds:.0f} s; ended")
    except EOFError:
        process.join(5)
        yield Row(task.name, "the rest", FAILED, note=f"the process died: {process.exitcode}")
    finally:
        _end(process)
        ours.close()


def _child(sender: Connection, task: Task, device: str, tiny: bool, seconds: float) -> None:
    for row in task.rows(Setting.of(device, tiny, seconds)):
        sender.send(row)
    sender.send(None)
    sender.close()


def _end(process: Any) -> None:
    """It may still be closing its GPU: that is waited for, but not for ever."""
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join(5)
