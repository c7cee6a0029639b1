"""How long the scheduler takes for a step: `schedule()` and `update()`, no model between them.

    python -m bench.scheduler [--steps 300] [--running 256] [--waiting 10000]

Of each step is timed what the scheduler does: late sequences are dropped, the batch is
composed, its results are booked, and the figures of the load are read. Every sequence
has a deadline and 1,000 tokens before its first output, in blocks of 16.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

import click

from bench.table import print_table
from worker.block_pool import BlockPool
from worker.scheduler import Scheduler
from worker.scores import StepResult
from worker.sequence import SampledToken, SamplingParams, Sequence

BLOCK_SIZE, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 1000, 500
BUDGET = 8192
URGENT_TOKENS = 20
TOKEN = SampledToken(7)
FAR = 1e9


@dataclass(frozen=True)
class Case:
    """What runs and what waits. `spare_places` are never filled: blocks are short.

    With `churn` sequences end at random, after 100 tokens on average, and the next enter.
    With `urgent` one of a higher priority comes at every step, takes a place and ends soon.
    """

    name: str
    running: int
    waiting: int
    spare_places: int = 0
    churn: bool = False
    urgent: bool = False

    def scheduler(self) -> Scheduler:
        per_sequence = -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE)
        blocks = (PROMPT_TOKENS // BLOCK_SIZE + 2) if self.spare_places else per_sequence
        return Scheduler(
            BlockPool(self.running * blocks + 40, BLOCK_SIZE),
            max_num_seqs=self.running + self.spare_places,
            max_num_batched_tokens=max(BUDGET, self.running),
            max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS,
        )


def arrivals(case: Case, random: Random) -> Iterator[Sequence]:
    """Prompts without a common beginning, each with a deadline that does not come."""
    sampling = SamplingParams(temperature=0.0)
    for number in count(1):
        output = random.randint(1, 199) if case.churn else OUTPUT_TOKENS
        prompt = [number, *range(PROMPT_TOKENS - 1)]
        yield Sequence(number, prompt, sampling, output, order=number, deadline=FAR + number)


def urgent(sequence: Sequence) -> Sequence:
    """The same for a higher priority, and short."""
    sequence.priority, sequence.max_tokens = 1, URGENT_TOKENS
    return sequence


def timed_steps(case: Case, steps: int, clock: Callable[[], float]) -> list[float]:
    """Seconds of each step, once everybody who fits is running."""
    random = Random(0)
    scheduler, coming = case.scheduler(), arrivals(case, random)
    for _ in range(case.running + case.waiting):
        scheduler.add(next(coming))
    for _ in range(2 + case.running * PROMPT_TOKENS // BUDGET):
        one_step(scheduler, clock)
    taken = []
    for _ in range(steps):
        while scheduler.num_waiting < case.waiting:
            scheduler.add(next(coming))
        if case.urgent:
            scheduler.add(urgent(next(coming)))
        taken.append(one_step(scheduler, clock))
    if abs(scheduler.num_running - case.running) > case.running // 2:
        raise RuntimeError(f"{case.name}: {scheduler.num_running} run")
    return taken


def one_step(scheduler: Scheduler, clock: Callable[[], float]) -> float:
    """Seconds that the scheduler took before the batch and after it."""
    started = clock()
    scheduler.expire(0.0)
    output = scheduler.schedule()
    before = clock() - started
    if output is None:
        raise RuntimeError("nothing to schedule")
    result = StepResult({entry.sequence_id: TOKEN for entry in output.scheduled if entry.draw})
    started = clock()
    scheduler.update(output, result)
    _ = (scheduler.num_waiting, scheduler.num_waiting_tokens, scheduler.pool.num_cached)
    scheduler.levels()
    return before + clock() - started


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@click.command()
@click.option("--steps", default=300, show_default=True, help="Timed steps per case.")
@click.option("--running", default=256, show_default=True, help="Sequences in the batch.")
@click.option("--waiting", default=10_000, show_default=True, help="Sequences in the line.")
def main(steps: int, running: int, waiting: int) -> None:
    """Print medians and 99th percentiles of a step's milliseconds."""
    cases = [
        Case(f"{running} run", running, 0),
        Case(f"{running} run, {waiting} wait for a place", running, waiting),
        Case(f"{running} run, {waiting} wait for blocks", running, waiting, spare_places=16),
        Case(f"{running} run, {waiting} wait, 1 in 100 ends", running, waiting, churn=True),
        Case(f"{running} run, {waiting} wait, 1 gives way", running, waiting, urgent=True),
    ]
    rows = []
    for case in cases:
        wall = timed_steps(case, steps, time.perf_counter)
        cpu = timed_steps(case, steps, time.thread_time)
        figures = [percentile(wall, 0.5), percentile(wall, 0.99), percentile(cpu, 0.5)]
        rows.append([case.name, *(f"{1000 * seconds:.2f}" for seconds in figures)])
    print_table(f"{steps} steps", ["median ms", "p99 ms", "median CPU ms"], rows)


if __name__ == "__main__":
    main()
