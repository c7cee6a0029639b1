"""One measurement of one server, with its progress shown."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from bench.load.arrivals import Arrivals, ClosedLoop
from bench.load.grpc_target import grpc_target
from bench.load.openai_target import openai_target
from bench.load.runner import Run, drive
from bench.load.targets import Target
from bench.load.view import show_progress
from bench.load.workload import Workload


@dataclass(frozen=True, slots=True)
class Server:
    """Whom to ask: host:port of a router, or the http:// address of an OpenAI-compatible one."""

    address: str
    api_keys: tuple[str, ...]
    model: str
    temperature: float

    def open(self) -> AbstractAsyncContextManager[Target]:
        is_http = self.address.startswith(("http://", "https://"))
        return (openai_target if is_http else grpc_target)(
            self.address,
            self.api_keys,
            model=self.model,
            temperature=self.temperature,
            clock=time.perf_counter,
        )


async def measured(
    run: Run,
    server: Server,
    workload: Workload,
    arrivals: Arrivals,
    count: int,
    warm_up: int,
    console: Console,
) -> None:
    """Warm up, then fill in `run`; the requests of the warm-up are others than those counted."""
    requests = workload.requests(count + warm_up)
    async with server.open() as target:
        if warm_up:
            await drive(Run(), target, requests[count:], ClosedLoop(warm_up), time.perf_counter)
        await watched(
            run, console, drive(run, target, requests[:count], arrivals, time.perf_counter)
        )


async def watched(run: Run, console: Console, driving: Coroutine[Any, Any, None]) -> None:
    """Drive a run with its progress shown."""
    watching = asyncio.create_task(show_progress(run, console, time.perf_counter))
    try:
        await driving
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
