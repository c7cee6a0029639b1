"""Child processes that end when they are told to, and when this process ends.

Each child runs in a session of its own, so that Ctrl-C on the terminal reaches
the supervisor alone, and is told its parent's process id, so that it ends when
the supervisor is killed. Its output is JSON lines, one event each.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
Event = Mapping[str, Any]
# Hears every event of a child, by the child's name.
OnEvent = Callable[[str, Event], None]

KEPT_LINES = 20
_LINE_LIMIT = 1 << 20
# A dead child's pipe may be held open by what it started; its last lines are not waited for longer.
_LAST_WORDS_S = 1.0


@dataclass(frozen=True)
class StopRule:
    """How children are stopped: SIGTERM, and SIGKILL after `grace_s` or once `hurry` is set.

    The grace is longer than the 60 s for which a service lets running answers end.
    """

    grace_s: float = 70.0
    hurry: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class ChildSpec:
    """What to run: a name for people, the command, and what its environment has besides."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class ChildDiedError(Exception):
    """A child ended by itself. `lines` are the last it wrote."""

    def __init__(self, name: str, returncode: int, lines: Sequence[str]) -> None:
        how = f"signal {-returncode}" if returncode < 0 else f"exit status {returncode}"
        super().__init__(f"{name} ended by itself ({how})")
        self.lines = tuple(lines)


class Child:
    """A running child process, its last lines and its events."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process) -> None:
        self.name = spec.name
        self.process = process
        self.reading: asyncio.Task[None] | None = None
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        # The first thing that hearing an event raised: a defect, told when the child has ended.
        self.unheard: Exception | None = None
        self._seen: dict[str, asyncio.Future[Event]] = {}

    def note(self, line: str) -> Event:
        """Take in one line of output; the event it is. Any other text is an event as well."""
        self.lines.append(line)
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            return {"event": line}
        future = self._future(str(event.get("event")))
        if not future.done():
            future.set_result(event)
        return event

    async def event(self, name: str) -> Event:
        """The first event of this name, past or future."""
        return await asyncio.shield(self._future(name))

    def _future(self, name: str) -> asyncio.Future[Event]:
        if name not in self._seen:
            self._seen[name] = asyncio.get_running_loop().create_future()
        return self._seen[name]

    async def died(self) -> ChildDiedError:
        """The error that says how it ended, with what it wrote last."""
        if self.reading is not None:
            await asyncio.wait({self.reading}, timeout=_LAST_WORDS_S)
        return ChildDiedError(self.name, self.process.returncode or 0, self.lines)


async def unless_died(children: Sequence[Child], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises ChildDiedError, and cancels it, if a child ends first.

    Raises as well what ended the reading of a child's output: unread, it would stand still.
    """
    working = asyncio.create_task(work)
    endings = [asyncio.create_task(child.process.wait()) for child in children]
    waiting = {working, *endings, *(child.reading for child in children if child.reading)}
    try:
        while not working.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for child, ending in zip(children, endings, strict=True):
                if ending.done():
                    raise await child.died()
            for reading in done - {working}:
                reading.result()
        return working.result()
    finally:
        for task in (working, *endings):
            task.cancel()
        await asyncio.gather(working, *endings, return_exceptions=True)


@contextlib.asynccontextmanager
async def running_child(spec: ChildSpec, on_event: OnEvent, rule: StopRule) -> AsyncIterator[Child]:
    """Run a child; on exit it is stopped by the rule, and at once when that is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *spec.argv,
        "--parent-pid",
        str(os.getpid()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **spec.environment},
        start_new_session=True,
        limit=_LINE_LIMIT,
    )
    child = Child(spec, process)
    child.reading = reading = asyncio.create_task(_read(child, on_event))
    try:
        yield child
    finally:
        try:
            await _stop(process, rule)
        finally:
            await _end_of(reading)
        if child.unheard is not None:
            raise child.unheard


async def _end_of(reading: asyncio.Task[None]) -> None:
    """Wait for a dead child's last lines."""
    await asyncio.wait({reading}, timeout=_LAST_WORDS_S)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def _read(child: Child, on_event: OnEvent) -> None:
    """Read to the end whatever `on_event` raises: a child whose output is not read stands still."""
    async for line in _lines(child):
        try:
            on_event(child.name, child.note(line))
        except Exception as failure:
            child.unheard = child.unheard or failure


async def _lines(child: Child) -> AsyncIterator[str]:
    stream = child.process.stdout
    assert stream is not None
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            # Longer than the limit: the stream has dropped it, and goes on behind it.
            continue
        if not line:
            return
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            yield text


async def _stop(process: asyncio.subprocess.Process, rule: StopRule) -> None:
    ending = asyncio.create_task(process.wait())
    hurrying = asyncio.create_task(rule.hurry.wait())
    try:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        await asyncio.wait(
            {ending, hurrying}, timeout=rule.grace_s, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        hurrying.cancel()
        if not ending.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await ending
