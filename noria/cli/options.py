"""The options that `noria up` and `noria demo` share: which model, and the worker's own flags."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from noria.cli.model_source import DEFAULT_MODEL

F = TypeVar("F", bound=Callable[..., Any])

_MODEL_WORDS = "A known name, a .gguf file or model folder, or a repository of the hub"
_MODEL_METAVAR = "NAME|PATH|ORG/NAME"
MODEL = click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    metavar=_MODEL_METAVAR,
    help=f"{_MODEL_WORDS}.",
)
# Several models, each with workers of its own.
MODELS = (
    click.option(
        "--model",
        "models",
        multiple=True,
        default=(DEFAULT_MODEL,),
        show_default=True,
        metavar=_MODEL_METAVAR,
        help=f"{_MODEL_WORDS}; again for a further model.",
    ),
    click.option(
        "--served-model-name",
        "served_names",
        multiple=True,
        metavar="NAME",
        help="Name that requests use; once for each --model, in their order.",
    ),
    click.option(
        "--alias",
        "aliases",
        multiple=True,
        metavar="ALIAS=NAME",
        help="A further name of a served model; repeatable.",
    ),
)
WORKERS = click.option(
    "--workers",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="How many workers of each model.",
)
VERBOSE = click.option("--verbose", is_flag=True, help="Show everything the services log.")

_POSITIVE = click.IntRange(min=1)
# Passed on to every worker as they are; left out, the worker's own defaults hold.
_WORKER_OPTIONS = (
    click.option("--max-num-seqs", type=_POSITIVE, help="Sequences in one batch."),
    click.option("--max-num-batched-tokens", type=_POSITIVE, help="Token budget of one step."),
    click.option("--max-model-len", type=_POSITIVE, help="Prompt and output together, in tokens."),
    click.option("--num-blocks", type=_POSITIVE, help="KV blocks."),
    click.option("--kv-cache-memory-bytes", type=_POSITIVE, help="Each worker's, for KV blocks."),
    click.option("--attention-backend", help="What computes, for example torch."),
    click.option("--dtype", help="Of the weights, for example float32."),
    click.option("--cpu-threads", type=_POSITIVE, help="Threads of each worker's engine."),
    click.option(
        "--script",
        type=click.Path(exists=True, dir_okay=False, resolve_path=True),
        help="Replay given tokens in place of the model's forward pass.",
    ),
)


def stack_options(command: F) -> F:
    """Add all of them to a command that runs one model."""
    return _with((MODEL, WORKERS, *_WORKER_OPTIONS, VERBOSE), command)


def models_options(command: F) -> F:
    """Add all of them to a command that runs one model or several."""
    return _with((*MODELS, WORKERS, *_WORKER_OPTIONS, VERBOSE), command)


def _with(options: Sequence[Callable[[F], F]], command: F) -> F:
    for option in reversed(options):
        command = option(command)
    return command


def worker_flags(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The given ones as the worker's command line has them."""
    flags: list[str] = []
    for name, value in values.items():
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(flags)
