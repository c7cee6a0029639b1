"""`noria up`: the three services on this computer, until Ctrl-C.

When one of them ends by itself, that is said and everything is stopped: what an
operator's supervisor restarts is the whole, so nothing here hides a crash.
"""

import asyncio
import contextlib
import dataclasses
import errno
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from noria.cli.keys import ensure_key, ensure_keys_file
from noria.cli.model_source import ModelSource, ModelSourceError, resolve_model
from noria.cli.options import models_options, worker_flags
from noria.cli.progress import EventPrinter, start_view
from noria.cli.served_models import NamesError, ServedModel, own_names, served_models
from noria.cli.stack import HOST, RunningStack, StackPlan, missing_packages, running_stack
from noria.cli.supervisor import ChildDiedError, Event, StopRule, unless_died
from noria.cli.terminal import best_effort, tell
from noria.service.api_key import key_sha256

DEFAULT_PORT = 50051
FIRST_METRICS_PORT = 9464
_METRICS_PORTS_TRIED = 200
WhileReady = Callable[[RunningStack], Coroutine[Any, Any, None]]


@click.command()
@click.option(
    "--port",
    default=DEFAULT_PORT,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="The router's; 0 picks a free one.",
)
@click.option(
    "--metrics-port",
    default=FIRST_METRICS_PORT,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="The router's metrics; the other services take the next free ones. 0: any.",
)
@models_options
def up(
    port: int,
    metrics_port: int,
    models: Sequence[str],
    served_names: Sequence[str],
    aliases: Sequence[str],
    workers: int,
    verbose: bool,
    **flags: Any,
) -> None:
    """Start router, tokenizers and workers on this computer; Ctrl-C stops them.

    A second Ctrl-C does not wait for answers that are still running.
    """
    key, keys_file = ensured_keys()
    names = partial(served_models, names=served_names, aliases=aliases)
    plan = prepare(port, models, workers, flags, key, names)
    ports = free_ports(metrics_port, 1 + len(models) * (1 + workers))
    plan = dataclasses.replace(plan, keys_file=keys_file, metrics_ports=ports)
    run_stack(plan, _announce_and_wait, verbose=verbose)


async def _announce_and_wait(stack: RunningStack) -> None:
    port = stack.address.rpartition(":")[2]
    address = "" if port == str(DEFAULT_PORT) else f" --address {stack.address}"
    names = stack.model_names
    model = f" --model {names[0]}" if len(names) > 1 else ""
    click.echo(f"serving: {', '.join(names)} on {stack.address}")
    click.echo(f'ask:     noria chat{address}{model} "Is a tomato a fruit?"')
    click.echo(f"metrics: {_metrics(stack.metrics)}")
    click.echo("stop:    Ctrl-C")
    await asyncio.Event().wait()


def _metrics(addresses: Mapping[str, str]) -> str:
    if not addresses:
        return "none, there are too few free ports; choose others with --metrics-port"
    return ", ".join(f"http://{address}/metrics ({name})" for name, address in addresses.items())


def ensured_keys() -> tuple[str, Path | None]:
    """The key that this user's router takes, and the router's file, if it has one."""
    try:
        key = ensure_key()
        return key, ensure_keys_file(key)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"API key: {error}") from error


def prepare(
    port: int,
    models: Sequence[str],
    workers: int,
    flags: Mapping[str, Any],
    key: str,
    names: Callable[[Sequence[ModelSource]], tuple[ServedModel, ...]] = own_names,
) -> StackPlan:
    """What to run, with everything checked that can be checked before a process starts.

    `workers` are those of each model; `names` says under which names the models are served.
    """
    missing = missing_packages()
    if missing:
        raise click.ClickException(
            f'the services\' packages are missing: pip install "noria[all]"'
            f" (not installed: {', '.join(missing)})"
        )
    _check_port(port)
    total = workers * len(models)
    threads = flags.get("cpu_threads")
    if total > 1 and threads is None:
        # Workers that each take every core only wait for each other.
        threads = max(1, (os.cpu_count() or 1) // total)
    given = {**flags, "cpu_threads": threads, "local_workers": total if total > 1 else None}
    try:
        served = names([located_model(model) for model in models])
    except NamesError as error:
        raise click.UsageError(str(error)) from error
    return StackPlan(served, key_sha256(key), port, workers, worker_flags(given))


def located_model(model: str) -> ModelSource:
    """The model's files, downloaded if need be. Raises ClickException."""
    try:
        with _terminated_like_interrupted():
            return resolve_model(model, tell)
    except (ModelSourceError, OSError) as error:
        raise click.ClickException(str(error)) from error


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that a download leaves nothing behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_ports(first: int, count: int) -> tuple[int, ...]:
    """The next free ports from `first` on; none if there are too few nearby. 0: any ports."""
    if first == 0:
        return (0,) * count
    near = range(first, min(first + _METRICS_PORTS_TRIED, 65536))
    found = tuple(itertools.islice(filter(_is_free, near), count))
    return found if len(found) == count else ()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            why = "is taken" if error.errno == errno.EADDRINUSE else f"failed: {error.strerror}"
            message = f"port {port} on {HOST} {why}; choose another with --port"
            raise click.ClickException(message) from error


def run_stack(plan: StackPlan, while_ready: WhileReady, *, verbose: bool) -> None:
    """Run the services and `while_ready` beside them; stop all when it ends or on a signal.

    Raises ClickException when a service ends by itself, after its last lines are shown.
    """
    printer = EventPrinter(Console(file=best_effort(sys.stderr)), everything=verbose)
    try:
        asyncio.run(_until_signalled(lambda rule: _run(plan, while_ready, rule, printer)))
    except ChildDiedError as error:
        for line in error.lines:
            tell(f"  {line}")
        raise click.ClickException(f"{error}; everything is stopped") from error


async def _run(
    plan: StackPlan, while_ready: WhileReady, rule: StopRule, printer: EventPrinter
) -> None:
    async with contextlib.AsyncExitStack() as held:
        with start_view(printer.console) as view:

            def show(child: str, event: Event) -> None:
                printer.on_event(child, event)
                view.on_event(child, event)

            begun = time.monotonic()
            stack = await held.enter_async_context(running_stack(plan, show, rule))
        tell(f"ready in {time.monotonic() - begun:.1f} s")
        await unless_died(stack.children, while_ready(stack))


async def _until_signalled(work: Callable[[StopRule], Coroutine[Any, Any, None]]) -> None:
    """Run `work`; SIGINT, SIGTERM or SIGHUP cancels it, a second one hurries its end."""
    rule = StopRule()
    task = asyncio.create_task(work(rule))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if task.cancelling():
            rule.hurry.set()
            return
        task.cancel()
        tell("stopping; a second Ctrl-C does not wait for running answers")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup has asked that a hangup be ignored. A shell's `&` asks the same of SIGINT, but
        # whoever sends one to a service in the background means it.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop)
    with contextlib.suppress(asyncio.CancelledError):
        await task
