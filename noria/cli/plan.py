"""`noria plan`: what a model needs, what a card holds of it, how many replicas a load takes."""

import json
from dataclasses import dataclass, replace
from typing import Any

import click
from rich.console import Console

from noria.cli.model_source import DEFAULT_MODEL, ModelSourceError, config_of
from noria.cli.terminal import tell
from noria.models.description import Description, describe
from noria.models.kernels import reasons_against
from noria.plan.capacity import Capacity, Settings, capacity
from noria.plan.cards import CARDS, CPU, Card, named_card, this_computer
from noria.plan.kv import DEFAULT_BLOCK_SIZE, DTYPE_BYTES
from noria.plan.load import Load, plan_fleet
from noria.plan.memory import host_memory
from noria.plan.render import show
from noria.plan.report import Plan, check_chats, numbers_of
from noria.plan.shape import ModelShape, shape_of
from noria.plan.units import parse_bytes

_CARDS = f"{CPU}: this computer's free memory; {', '.join(CARDS)}."
_COUNT = click.IntRange(1, 1 << 40)
_ABOVE_0 = click.FloatRange(0, 1e15, min_open=True)
_SHARE = click.FloatRange(0, 1, min_open=True)


class _Size(click.ParamType[int]):
    """A number of bytes, with or without a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@dataclass(frozen=True)
class _Asked:
    """The options as given."""

    model: str
    card: str
    memory: int | None
    bandwidth: float | None
    tflops: float | None
    dtype: str | None
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    workers: int
    block_size: int
    max_num_seqs: int | None
    max_num_batched_tokens: int
    chat_len: int | None
    chats: int | None
    request_rate: float | None
    input_len: int | None
    output_len: int | None
    tokens_per_s: float | None
    prefill_tokens_per_s: float | None
    target_utilization: float


@click.command(short_help="What a model needs, a card holds, a load takes.")
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    metavar="NAME|PATH|ORG/NAME",
    help="A config.json or its folder, a .gguf file, a known name, or a repository of the hub.",
)
@click.option("--card", default=CPU, show_default=True, help=_CARDS)
@click.option("--memory", type=_Size(), help="Of any other card, for example 80GiB.")
@click.option("--bandwidth", type=_ABOVE_0, help="Of its memory, in GB/s.")
@click.option("--tflops", type=_ABOVE_0, help="Its dense bf16 arithmetic, in TFLOP/s.")
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPE_BYTES)),
    help="Of weights and KV. Default: on cpu as a worker, else the config's.",
)
@click.option(
    "--gpu-memory-utilization",
    type=_SHARE,
    default=0.9,
    show_default=True,
    help="The part of a card's memory that may be taken.",
)
@click.option("--kv-cache-memory-bytes", type=_Size(), help="Default: what is left.")
@click.option("--workers", type=_COUNT, default=1, show_default=True, help="On this computer.")
@click.option(
    "--block-size", type=_COUNT, default=DEFAULT_BLOCK_SIZE, show_default=True,
    help="Tokens of a KV block.",
)  # fmt: skip
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1, 1 << 16),
    help="Places in the batch. Default: as suggested.",
)
@click.option(
    "--max-num-batched-tokens", type=_COUNT, default=512, show_default=True,
    help="Positions computed in one step.",
)  # fmt: skip
@click.option("--chat-len", type=_COUNT, help="Prompt and answer, in tokens. Default: 2000.")
@click.option("--chats", type=_COUNT, help="Chats of that length that have to fit at once.")
@click.option("--request-rate", type=_ABOVE_0, help="Requests/s over all replicas.")
@click.option("--input-len", type=_COUNT, help="Tokens of a prompt.")
@click.option("--output-len", type=_COUNT, help="Tokens of an answer.")
@click.option("--tokens-per-s", type=_ABOVE_0, help="Output of one replica, measured.")
@click.option("--prefill-tokens-per-s", type=_ABOVE_0, help="Prompts of one replica, measured.")
@click.option(
    "--target-utilization",
    type=click.FloatRange(0, 0.99, min_open=True),
    default=0.8,
    show_default=True,
    help="The part of a replica's measured output that is planned for.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def plan(as_json: bool, **options: Any) -> None:
    """Say what a model needs, what a card holds of it, and how many replicas a load takes.

    It reads the model's config alone; weights are not needed. Given --request-rate, --input-len,
    --output-len and --tokens-per-s it also plans a fleet.
    """
    asked = _Asked(**options)
    try:
        made = _planned(asked)
    except (ValueError, OSError, ModelSourceError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(numbers_of(made), indent=2))
    else:
        show(made, Console())


def _planned(asked: _Asked) -> Plan:
    card = _card(asked)
    _check_load(asked)
    source = config_of(asked.model, tell)
    described = describe(source.path)
    shape = shape_of(described)
    held = capacity(shape, card, _settings(asked, card, described))
    chat_len = _chat_len(asked, shape)
    max_num_seqs = asked.max_num_seqs or held.suggested_max_num_seqs(chat_len)
    made = Plan(
        *(source.name, held, chat_len, max_num_seqs, asked.chats),
        max_num_seqs_given=asked.max_num_seqs is not None,
    )
    check_chats(made)
    return made if asked.request_rate is None else _with_load(made, asked, held)


def _card(asked: _Asked) -> Card:
    if asked.workers > 1 and (asked.card != CPU or asked.memory is not None):
        raise click.UsageError("--workers divides this computer's memory: for --card cpu alone")
    if asked.memory is not None:
        if asked.card != CPU:
            raise click.UsageError("--memory describes a card that has no name: leave out --card")
        card = Card("a card", asked.memory)
    elif asked.card == CPU:
        card = this_computer(host_memory())
    else:
        card = named_card(asked.card)
    if asked.bandwidth is not None:
        card = replace(card, bandwidth=asked.bandwidth * 1e9)
    return card if asked.tflops is None else replace(card, flops=asked.tflops * 1e12)


def _check_load(asked: _Asked) -> None:
    needed = {
        "--request-rate": asked.request_rate,
        "--input-len": asked.input_len,
        "--output-len": asked.output_len,
        "--tokens-per-s": asked.tokens_per_s,
    }
    missing = [name for name, value in needed.items() if value is None]
    if 0 < len(missing) < len(needed):
        raise click.UsageError(f"a load is planned from {', '.join(needed)}; "
                               f"missing: {', '.join(missing)}")  # fmt: skip


def _settings(asked: _Asked, card: Card, described: Description) -> Settings:
    """On this computer as its workers choose, on a card in the checkpoint's own type."""
    given = asked.dtype or "auto"
    on_kernels = card.is_host and not reasons_against(described.config, given, asked.block_size)
    in_files = described.dtype if described.dtype in DTYPE_BYTES else "bfloat16"
    own = ("bfloat16" if on_kernels else "float32") if card.is_host else in_files
    return Settings(
        dtype=asked.dtype or own,
        on_kernels=on_kernels,
        block_size=asked.block_size,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        gpu_memory_utilization=asked.gpu_memory_utilization,
        workers=asked.workers,
        kv_cache_memory_bytes=asked.kv_cache_memory_bytes,
    )


def _chat_len(asked: _Asked, shape: ModelShape) -> int:
    """As given, else the load's prompt and answer, else 2,000 or what the model allows."""
    longest = shape.max_position_embeddings
    loaded = (asked.input_len or 0) + (asked.output_len or 0)
    length = asked.chat_len or loaded or min(2000, longest)
    if length > longest:
        given = "chat_len" if asked.chat_len else "input_len + output_len"
        raise ValueError(f"{given} {length:,} exceeds the model's {longest:,} positions")
    return length


def _with_load(made: Plan, asked: _Asked, held: Capacity) -> Plan:
    prefill = asked.prefill_tokens_per_s
    load = Load(
        request_rate=asked.request_rate or 0,
        input_len=asked.input_len or 0,
        output_len=asked.output_len or 0,
        tokens_per_s=asked.tokens_per_s or 0,
        prefill_tokens_per_s=prefill or held.prefill_tokens_per_s(asked.input_len or 0),
        max_num_seqs=made.max_num_seqs,
        utilization=asked.target_utilization,
    )
    return replace(made, load=load, fleet=plan_fleet(load), prefill_measured=prefill is not None)
