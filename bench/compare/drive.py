"""Requests through scheduler and model under a batching policy; no wire and no text.

The same loop runs against a real model and clock, and against a curve of step times and a
clock that it moves: the second is what the first is predicted to take.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.compare.policies import Ask, Policy
from worker.scheduler import Scheduler
from worker.scores import StepResult
from worker.sequence import SamplingParams, SchedulerOutput
from worker.sequence import Sequence as Live

GREEDY = SamplingParams(temperature=0.0)


class Clock(Protocol):
    """Seconds from some moment on."""

    def now(self) -> float: ...

    def wait_until(self, at: float) -> None: ...


class WallClock:
    """Real time."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, at: float) -> None:
        time.sleep(max(0.0, at - self.now()))


class VirtualClock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, at: float) -> None:
        self._now = max(self._now, at)


class Runner(Protocol):
    """Computes a step; `worker.model_runner.ModelRunner`, or a curve in its place."""

    def execute(self, output: SchedulerOutput) -> StepResult: ...


@dataclass(slots=True)
class Served:
    """What became of a request: the times of its own tokens, in seconds after the start.

    Tokens beyond those it asked for, which some policies compute, are not among them.
    """

    ask: Ask
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.ask.arrival_s

    @property
    def latency_s(self) -> float:
        return self.token_times[-1] - self.ask.arrival_s


@dataclass(frozen=True, slots=True)
class Step:
    """One step: when it ended, its seconds, its sequences and positions, and the rows of
    them that still owe somebody a token.
    """

    ended_at: float
    took_s: float
    sequences: int
    positions: int
    useful: int

    @property
    def is_decode(self) -> bool:
        """Whether no prompt was computed beside the decodes."""
        return self.positions == self.sequences


@dataclass(frozen=True, slots=True)
class Driven:
    """All of a run. Times are seconds after its start."""

    served: list[Served]
    steps: list[Step]

    @property
    def wall_s(self) -> float:
        return self.steps[-1].ended_at

    @property
    def tokens_per_s(self) -> float:
        """Tokens that somebody asked for, per second."""
        return sum(len(served.token_times) for served in self.served) / self.wall_s


def drive(
    asks: Iterable[Ask], policy: Policy, scheduler: Scheduler, runner: Runner, clock: Clock
) -> Driven:
    """Serve all of them, each as soon as it has arrived and the policy lets it in."""
    coming = deque(sorted(asks, key=lambda ask: ask.arrival_s))
    waiting: list[Ask] = []
    running: dict[int, Served] = {}
    done: list[Served] = []
    steps: list[Step] = []
    began = clock.now()
    while coming or waiting or running:
        now = clock.now() - began
        while coming and coming[0].arrival_s <= now:
            waiting.append(coming.popleft())
        for ask, computed in policy.admit(waiting, len(running), now, bool(coming)):
            waiting.remove(ask)
            number = len(done) + len(running)
            running[number] = Served(ask)
            scheduler.add(Live(number, list(ask.prompt), GREEDY, computed, number))
        output = scheduler.schedule()
        if output is None:
            clock.wait_until(began + _next_event(coming, policy, waiting))
            continue
        useful = sum(_owes(running[entry.sequence_id]) for entry in output.scheduled)
        updates = scheduler.update(output, runner.execute(output))
        ended = clock.now() - began
        steps.append(Step(ended, ended - now, len(output.scheduled), output.num_tokens, useful))
        for update in updates:
            served = running[update.sequence.sequence_id]
            if update.token is not None and _owes(served):
                served.token_times.append(ended)
            if update.sequence.finish_reason is not None:
                done.append(running.pop(update.sequence.sequence_id))
    return Driven(done, steps)


def _owes(served: Served) -> bool:
    return len(served.token_times) < served.ask.output_tokens


def _next_event(coming: Sequence[Ask], policy: Policy, waiting: Sequence[Ask]) -> float:
    times = [ask.arrival_s for ask in list(coming)[:1]]
    times += [waiting[0].arrival_s + policy.patience_s] if waiting and policy.patience_s else []
    if not times:
        raise RuntimeError("nobody runs, and the policy lets nobody in")
    return min(times)
