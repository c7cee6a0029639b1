"""`noria bench`: ask a server much, and tell how it answered."""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.compare.cli import compare
from bench.load.arrivals import Arrivals, ClosedLoop, poisson, replayed
from bench.load.distributions import FORMS
from bench.load.runner import Run
from bench.load.summary import Objective, summarize
from bench.load.view import summary_table
from bench.load.workload import Workload
from bench.measure import Server, measured
from bench.options import LENGTHS
from bench.overhead.command import router
from bench.quick import quick
from bench.sweep import sweep
from noria.client.connection import find_api_key

_SHARE = click.FloatRange(0, 1)
_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.group(invoke_without_command=True)
@click.option(
    "--target",
    default="localhost:50051",
    show_default=True,
    metavar="HOST:PORT|URL",
    help="A Noria router, or the http:// address of a server with OpenAI's chat API.",
)
@click.option("--api-key", "api_keys", multiple=True, help="Repeatable: tenants that take turns.")
@click.option("--model", default="", help="Its name; may be left out where one is served.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0, 2))
@click.option("-n", "--requests", "count", default=64, show_default=True, type=click.IntRange(1))
@click.option("-c", "--concurrency", type=click.IntRange(1), help="So many at a time (default: 8).")
@click.option("--rate", type=_POSITIVE, help="Instead: so many a second on average (Poisson).")
@click.option(
    "--replay",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Instead: at the times of a file, one a line, in seconds.",
)
@click.option("--prompt-words", default="64", show_default=True, type=LENGTHS, help=FORMS)
@click.option("--output-tokens", default="128", show_default=True, type=LENGTHS, help=FORMS)
@click.option("--prefix-words", default=0, type=click.IntRange(0), help="That all begin with.")
@click.option("--prefix-share", default=1.0, type=_SHARE, help="Those that begin with them.")
@click.option("--priorities", type=LENGTHS, help="Of the requests, for example mix:1@0.9,5@0.1.")
@click.option("--cancel-share", default=0.0, type=_SHARE, help="Streams that clients close early.")
@click.option("--slow-share", default=0.0, type=_SHARE, help="Clients that pause between reads.")
@click.option("--slow-pause", default=0.1, type=_POSITIVE, help="Their pause in seconds.")
@click.option("--deadline", default=600.0, type=_POSITIVE, help="Of each request, in seconds.")
@click.option("--seed", default=1, show_default=True, help="Of lengths, words and arrivals.")
@click.option("--warm-up", default=0, type=click.IntRange(0), help="Requests before it counts.")
@click.option("--slo-ttft", type=_POSITIVE, help="Good requests: time to first token, in ms.")
@click.option("--slo-itl", type=_POSITIVE, help="Good requests: inter-token latency, in ms.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="A PNG.")
@click.pass_context
def bench(context: click.Context, /, **options: Any) -> None:
    """Load a chat server and measure throughput, latencies and errors.

    Every stream is asked for an exact number of tokens, and checked to have brought them.
    """
    if context.invoked_subcommand is None:
        _measure(options)


def _measure(options: Mapping[str, Any]) -> None:
    workload, arrivals = _workload(options), _arrivals(options)
    keys = options["api_keys"] or (find_api_key(None, options["target"]) or "",)
    server = Server(options["target"], keys, options["model"], options["temperature"])
    console = Console(stderr=True)
    run = Run()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(
            measured(run, server, workload, arrivals, options["count"], options["warm_up"], console)
        )
    summary = summarize(run, Objective(options["slo_ttft"], options["slo_itl"]))
    title = f"{options['target']}: {_described(arrivals)}"
    Console().print(summary_table(summary, title))
    if options["json_path"]:
        told = {"target": options["target"], "load": _described(arrivals), **summary.to_json()}
        options["json_path"].write_text(json.dumps(told, indent=2) + "\n")
    if options["plot_path"]:
        from bench.load.plots import plot_run

        plot_run(run, title, options["plot_path"])
    if summary.faults or not summary.ended:
        raise SystemExit(1)


def _workload(options: Mapping[str, Any]) -> Workload:
    return Workload(
        prompt_words=options["prompt_words"],
        output_tokens=options["output_tokens"],
        prefix_words=options["prefix_words"],
        prefix_share=options["prefix_share"],
        num_tenants=max(1, len(options["api_keys"])),
        priorities=options["priorities"],
        cancel_share=options["cancel_share"],
        slow_share=options["slow_share"],
        slow_pause_s=options["slow_pause"],
        deadline_s=options["deadline"],
        seed=options["seed"],
    )


def _arrivals(options: Mapping[str, Any]) -> Arrivals:
    chosen = [name for name in ("concurrency", "rate", "replay") if options[name] is not None]
    if len(chosen) > 1:
        raise click.UsageError(f"--{chosen[0]} and --{chosen[1]}: one of them")
    if options["rate"] is not None:
        return poisson(options["rate"], options["count"], options["seed"])
    if options["replay"] is not None:
        try:
            return replayed(options["replay"], options["count"])
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    return ClosedLoop(options["concurrency"] or 8)


def _described(arrivals: Arrivals) -> str:
    if isinstance(arrivals, ClosedLoop):
        return f"{arrivals.concurrency} at a time"
    rate = len(arrivals.times_s) / (arrivals.times_s[-1] or 1)
    return f"open loop, {rate:.2f} a second"


for _command in (quick, sweep, compare, router):
    bench.add_command(_command)
