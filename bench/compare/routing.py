"""Round robin against least tokens, on outputs of which a few are very long.

Round robin is what a load balancer does in front of replicas: here a router for each worker,
asked in turn. Least tokens is one router for all of them. The workers replay a script at a
fixed pace, so that nothing but the placement differs.
"""

import asyncio
import contextlib
import json
import random
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import click
from rich.console import Console

from bench.compare.options import new_table, tell, with_outputs
from bench.load.arrivals import poisson
from bench.load.distributions import Lengths
from bench.load.outcome import Outcome
from bench.load.runner import Run, drive
from bench.load.summary import Objective, Summary, summarize
from bench.load.targets import Target
from bench.load.workload import Request, Workload
from bench.measure import Server, watched
from bench.options import LENGTHS
from noria.cli.model_source import DEFAULT_MODEL, resolve_model
from noria.cli.served_models import own_names
from noria.cli.stack import StackPlan, another_router, running_stack, worker_addresses
from noria.cli.supervisor import StopRule
from noria.service.api_key import key_sha256

ROUND_ROBIN, LEAST_TOKENS = "round robin", "least tokens"
_SAMPLE = 100_000


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers of `places` sequences, each step of which takes `step_s`."""

    workers: int
    places: int
    step_s: float

    def capacity(self, lengths: Lengths) -> float:
        """Requests per second that it can serve: a token takes a step, a place, and no more."""
        rng = random.Random(0)
        mean = fmean(lengths.draw(rng) for _ in range(_SAMPLE))
        return self.workers * self.places / (mean * self.step_s)


class RoundRobin:
    """Asks each of its targets in turn."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets

    async def ask(self, request: Request, outcome: Outcome) -> None:
        await self._targets[request.index % len(self._targets)].ask(request, outcome)


async def compared(
    plan: StackPlan, key: str, requests: Sequence[Request], rate: float, console: Console
) -> dict[str, Run]:
    """The same requests at the same times, through a router for each worker, then one for all."""
    arrivals, rule = poisson(rate, len(requests), seed=1), StopRule()
    told: dict[str, Run] = {}
    async with contextlib.AsyncExitStack() as held:
        stack = await held.enter_async_context(running_stack(plan, _ignore, rule))

        async def target_at(address: str) -> Target:
            server = Server(address, (key,), "", 0.0)
            return await held.enter_async_context(server.open())

        single = [
            await held.enter_async_context(another_router(stack, [worker], plan, _ignore, rule))
            for worker in await worker_addresses(stack)
        ]
        ways = {
            ROUND_ROBIN: RoundRobin([await target_at(address) for address in single]),
            LEAST_TOKENS: await target_at(stack.address),
        }
        for name, target in ways.items():
            run = told[name] = Run()
            console.print(name)
            await watched(run, console, drive(run, target, requests, arrivals, time.perf_counter))
    return told


def _ignore(child: str, event: object) -> None:
    """What the services tell is not shown."""


@click.command()
@click.option("--workers", default=4, show_default=True, type=click.IntRange(2, 16))
@click.option("--max-num-seqs", default=4, show_default=True, type=click.IntRange(1))
@click.option("--step-ms", default=10.0, show_default=True, type=click.FloatRange(1))
@click.option("--output-tokens", default="mix:16@0.9,2000@0.1", show_default=True, type=LENGTHS)
@click.option("--load", default=0.8, show_default=True, type=click.FloatRange(0.01, 0.99))
@click.option("--requests", "count", default=600, show_default=True, type=click.IntRange(2))
@with_outputs
def routing(
    workers: int, max_num_seqs: int, step_ms: float, output_tokens: Lengths, load: float,
    count: int, json_path: Path | None, plot_path: Path | None,
) -> None:  # fmt: skip
    """Round robin against least tokens, on long-tailed outputs."""
    fleet = Fleet(workers, max_num_seqs, step_ms / 1e3)
    rate = load * fleet.capacity(output_tokens)
    requests = Workload(output_tokens=output_tokens).requests(count)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(
            json.dumps({"scripts": [], "step_seconds": fleet.step_s, "mean_output_tokens": 0})
        )
        plan, key = _plan(fleet, script)
        told = asyncio.run(compared(plan, key, requests, rate, Console(stderr=True)))
    summaries = {name: _summary(name, run) for name, run in told.items()}
    table = new_table(
        f"{count} requests, outputs {output_tokens.text}, {rate:.1f} a second ({load:.0%} of what"
        f" {workers} workers of {max_num_seqs} places can do)",
        "", "TTFT p50 ms", "p90 ms", "p99 ms", "all of it p50 ms", "p99 ms",
    )  # fmt: skip
    for name, of in summaries.items():
        first, last = of.ttft_ms, of.end_to_end_ms
        waits = (first.p50, first.p90, first.p99, last.p50, last.p99)
        table.add_row(name, *(f"{wait:,.0f}" for wait in waits))
    share = summaries[LEAST_TOKENS].ttft_ms.p99 / summaries[ROUND_ROBIN].ttft_ms.p99
    table.add_row("least tokens' share", "", "", f"{share:.2f}", "", "")
    tell(table, {name: of.to_json() for name, of in summaries.items()}, json_path)
    if plot_path is not None:
        from bench.compare.plots import plot_routing

        plot_routing(told, plot_path)


def _plan(fleet: Fleet, script: Path) -> tuple[StackPlan, str]:
    model = resolve_model(DEFAULT_MODEL, lambda text: click.echo(text, err=True))
    key = f"noria-{secrets.token_hex(24)}"
    flags = ("--script", str(script), "--max-num-seqs", str(fleet.places), "--cpu-threads", "1")
    return StackPlan(own_names([model]), key_sha256(key), 0, fleet.workers, flags), key


def _summary(name: str, run: Run) -> Summary:
    summary = summarize(run, Objective())
    if summary.faults or set(summary.ended) != {"SERVED"}:
        raise click.ClickException(f"{name}: not all was served: {summary.ended} {summary.faults}")
    return summary
