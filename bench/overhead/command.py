"""`noria bench router`: what router and tokenizer add, and how many tokens they carry."""

import asyncio
import contextlib
import json
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.compare.options import new_table, tell
from bench.load.summary import Percentiles
from bench.overhead.streams import Added, added, ask_all
from noria.cli.model_source import DEFAULT_MODEL, resolve_model
from noria.cli.served_models import ServedModel, own_names
from noria.cli.stack import StackPlan, backend_specs, router_spec, serving
from noria.cli.supervisor import Child, ChildSpec, StopRule, running_child, unless_died
from noria.service.api_key import key_sha256

_WARM_UP = 8


@dataclass(frozen=True, slots=True)
class Level:
    """So many streams at a time: what was added, and each service's CPU seconds."""

    streams: int
    interval_ms: float
    told: Added
    cpu_s: dict[str, float]

    def figures(self) -> dict[str, Any]:
        told = self.told
        first, token = Percentiles.of(told.first_s), Percentiles.of(told.token_s)
        return {
            "streams": self.streams,
            "interval_ms": self.interval_ms,
            "tokens_per_s": told.num_tokens / told.wall_s,
            "tokens_per_message": told.num_tokens / told.num_messages,
            "first_p50_ms": first.p50,
            "first_p99_ms": first.p99,
            "token_p50_ms": token.p50,
            "token_p99_ms": token.p99,
            "cpu_us_per_token": {n: s / told.num_tokens * 1e6 for n, s in self.cpu_s.items()},
        }


@dataclass(frozen=True, slots=True)
class Bench:
    """Router, tokenizer and the worker that computes nothing, serving."""

    address: str
    key: str
    children: tuple[Child, ...]

    def cpu_s(self) -> dict[str, float]:
        """User and system time of each service so far, and of this process, the clients."""
        ticks = os.sysconf("SC_CLK_TCK")
        own = os.times()
        told = {"clients": own.user + own.system}
        for child in self.children:
            fields = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()
            told[child.name] = (int(fields[11]) + int(fields[12])) / ticks
        return told


@contextlib.asynccontextmanager
async def running(model: ServedModel, interval_ms: float, emitted: Path) -> AsyncIterator[Bench]:
    """Start the three and wait until the router serves; `emitted` is written at the end."""
    key, rule = f"noria-{secrets.token_hex(24)}", StopRule()
    plan = StackPlan((model,), key_sha256(key), 0)
    argv = (sys.executable, "-P", "-m", "bench.overhead.fleet", "--model", str(model.path))
    told = ("--served-model-name", model.name, "--interval-ms", str(interval_ms))
    tokenizer = backend_specs(plan)[0]
    fleet = ChildSpec("fleet", (*argv, *told, "--emitted", str(emitted)), tokenizer.environment)
    async with contextlib.AsyncExitStack() as held:
        children = [
            await held.enter_async_context(running_child(spec, _ignore, rule))
            for spec in (tokenizer, fleet)
        ]
        backends = [
            str((await unless_died(children, child.event("listening")))["address"])
            for child in children
        ]
        spec = router_spec(plan, backends[:1], backends[1:])
        router = await held.enter_async_context(running_child(spec, _ignore, rule))
        children.append(router)
        yield Bench(await unless_died(children, serving(router)), key, tuple(children))


def _ignore(child: str, event: object) -> None:
    """What the services tell is not shown."""


async def level(
    model: ServedModel, streams: int, interval_ms: float, rounds: int, output_tokens: int
) -> Level:
    """Measure so many streams. Raises ValueError if a stream lost anything."""
    with tempfile.TemporaryDirectory() as folder:
        emitted = Path(folder) / "emitted.json"
        async with running(model, interval_ms, emitted) as bench:
            await ask_all(bench.address, bench.key, streams=_WARM_UP, requests=_WARM_UP,
                          output_tokens=8)  # fmt: skip
            before = bench.cpu_s()
            answers = await ask_all(
                bench.address,
                bench.key,
                streams=streams,
                requests=rounds * streams,
                output_tokens=output_tokens,
            )
            used = {name: cpu - before[name] for name, cpu in bench.cpu_s().items()}
        told = added(answers, json.loads(emitted.read_text()))
    return Level(streams, interval_ms, told, used)


@click.command("router")
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Its tokenizer alone.")
@click.option("--streams", "sizes", multiple=True, default=(1, 32, 256), show_default=True)
@click.option("--interval-ms", default=16.0, show_default=True, help="Between a stream's tokens.")
@click.option("--merged-interval-ms", default=2.0, show_default=True, help="More than is read.")
@click.option("--output-tokens", default=256, show_default=True, type=click.IntRange(1, 4000))
@click.option("--rounds", default=2, show_default=True, type=click.IntRange(1))
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
def router(
    model: str, sizes: Sequence[int], interval_ms: float, merged_interval_ms: float,
    output_tokens: int, rounds: int, json_path: Path | None,
) -> None:  # fmt: skip
    """What router and tokenizer add to each token, in front of a worker that computes nothing."""
    (served,) = own_names([resolve_model(model, lambda text: click.echo(text, err=True))])
    console = Console(stderr=True)
    levels = []
    wanted = [(size, interval_ms) for size in sizes] + [(max(sizes), merged_interval_ms)]
    for streams, interval in wanted:
        console.print(f"{streams} streams, a token every {interval:g} ms ...")
        levels.append(asyncio.run(level(served, streams, interval, rounds, output_tokens)))
    table = new_table(
        "one router, one tokenizer, a worker that computes nothing, clients on the same cores",
        "streams", "each ms", "tokens/s", "a message", "TTFT +ms p50", "p99",
        "token +ms p50", "p99",
    )  # fmt: skip
    figures = [each.figures() for each in levels]
    for of in figures:
        table.add_row(
            str(of["streams"]), f"{of['interval_ms']:g}", f"{of['tokens_per_s']:,.0f}",
            f"{of['tokens_per_message']:.2f}", f"{of['first_p50_ms']:.1f}",
            f"{of['first_p99_ms']:.1f}", f"{of['token_p50_ms']:.2f}", f"{of['token_p99_ms']:.1f}",
        )  # fmt: skip
    table.caption = "\n".join(("+: what lay between worker and client", *map(_cpu, figures)))
    tell(table, {"levels": figures}, json_path)


def _cpu(of: dict[str, Any]) -> str:
    used = ", ".join(f"{name} {us:.1f}" for name, us in of["cpu_us_per_token"].items())
    return f"{of['streams']} every {of['interval_ms']:g} ms: CPU us a token: {used}"
