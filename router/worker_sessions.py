"""One session for each worker that is found; none of them ends because a worker is not found.

A worker that no source tells of any more is left as soon as it is not connected: whoever is
gone ends its connection, and one that merely lost its lease or its name is still there.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import structlog

from noria.service.log import loop_end
from noria.service.tasks import keep_running
from router.connection import background
from router.discovery import SourceError, WorkerSource

_LEAVE_S = 1.0
Run = Callable[[], Coroutine[Any, Any, None]]


class WorkerSessions:
    """`new_session` gives what keeps an address connected; `is_connected` says whether it is."""

    def __init__(
        self,
        sources: Sequence[WorkerSource],
        new_session: Callable[[str], Run],
        is_connected: Callable[[str], bool],
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._sources = sources
        self._new_session = new_session
        self._is_connected = is_connected
        self._log = log
        self._found: dict[int, frozenset[str]] = {}
        self._problems: dict[int, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def num_known(self) -> int:
        """Workers that are connected or tried."""
        return len(self._tasks)

    @property
    def known(self) -> frozenset[str]:
        """Their addresses."""
        return frozenset(self._tasks)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look for workers inside the block, and end all sessions with it."""
        looking = [partial(self._follow, number) for number in range(len(self._sources))]
        runs: list[Run] = [*looking, self._leave_gone]
        loops = [keep_running(run, loop_end(self._log)) for run in runs]
        try:
            async with background(loops):
                yield
        finally:
            tasks, self._tasks = self._tasks, {}
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _follow(self, number: int) -> None:
        source = self._sources[number]
        while True:
            try:
                self._found[number] = await source.find()
            except SourceError as error:
                # What was found before holds on: who is gone will be noticed by its session.
                self._tell(number, str(error))
            else:
                self._tell(number, "")
            self._begin_new()
            await asyncio.sleep(source.interval_s)

    async def _leave_gone(self) -> None:
        while True:
            await asyncio.sleep(_LEAVE_S)
            for address in self._tasks.keys() - self._wanted():
                if not self._is_connected(address):
                    self._tasks.pop(address).cancel()
                    self._log.info("worker_left", worker_id=address)

    def _begin_new(self) -> None:
        for address in sorted(self._wanted() - self._tasks.keys()):
            kept = keep_running(self._new_session(address), loop_end(self._log))
            self._tasks[address] = asyncio.create_task(kept)

    def _wanted(self) -> frozenset[str]:
        return frozenset().union(*self._found.values())

    def _tell(self, number: int, problem: str) -> None:
        if problem and problem != self._problems.get(number):
            source = type(self._sources[number]).__name__
            self._log.warning("workers_not_found", source=source, reason=problem)
        self._problems[number] = problem
