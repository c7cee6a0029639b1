"""Asks all requests of a workload, each at its time, and notes what became of them."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.load.arrivals import Arrivals, ClosedLoop, OpenLoop
from bench.load.outcome import Outcome
from bench.load.targets import Target
from bench.load.workload import Request


@dataclass(slots=True)
class Run:
    """A run on its way, or done. `outcomes` are those of all requests that have been sent; one
    that has not ended has no `ended`.

    `cpu_s` is what the generator itself used of the processor; `late_s` how long after its
    time a request left at the worst.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    num_requests: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    cpu_s: float = 0.0
    late_s: float = 0.0

    @property
    def wall_s(self) -> float:
        return self.ended_at - self.started_at

    @property
    def num_ended(self) -> int:
        return sum(bool(outcome.ended) for outcome in self.outcomes)


async def drive(
    run: Run,
    target: Target,
    requests: Sequence[Request],
    arrivals: Arrivals,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Ask all requests; `run` tells how far it is, also while this goes on.

    Cancelling it closes every stream that is still open.
    """
    ask = _Asking(run, target, clock)
    run.num_requests = len(requests)
    run.started_at, cpu = clock(), _cpu_s()
    try:
        async with asyncio.TaskGroup() as group:
            if isinstance(arrivals, ClosedLoop):
                left = iter(requests)
                for _ in range(min(arrivals.concurrency, len(requests))):
                    group.create_task(ask.one_after_another(left))
            else:
                await _at_their_times(ask, group, requests, arrivals, sleep)
    finally:
        run.ended_at, run.cpu_s = clock(), _cpu_s() - cpu


class _Asking:
    def __init__(self, run: Run, target: Target, clock: Callable[[], float]) -> None:
        self.run, self.target, self.clock = run, target, clock

    async def one(self, request: Request, planned_at: float) -> None:
        outcome = Outcome(request.index, planned_at)
        self.run.outcomes.append(outcome)
        await self.target.ask(request, outcome)
        self.run.late_s = max(self.run.late_s, outcome.sent_at - planned_at)

    async def one_after_another(self, requests: Iterator[Request]) -> None:
        for request in requests:
            await self.one(request, self.clock())


async def _at_their_times(
    ask: _Asking,
    group: asyncio.TaskGroup,
    requests: Sequence[Request],
    arrivals: OpenLoop,
    sleep: Callable[[float], Awaitable[None]],
) -> None:
    for request, time_s in zip(requests, arrivals.times_s, strict=True):
        due = ask.run.started_at + time_s
        if (wait_s := due - ask.clock()) > 0:
            await sleep(wait_s)
        group.create_task(ask.one(request, due))


def _cpu_s() -> float:
    used = os.times()
    return used.user + used.system
