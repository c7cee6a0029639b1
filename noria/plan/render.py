"""A plan on a terminal of 80 columns, or in a file: each number with its arithmetic."""

from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from noria.plan.capacity import PREFILL_EFFICIENCY, UNMEASURED_MAX_NUM_SEQS, Capacity
from noria.plan.kv import DTYPE_BYTES, HOST_KV_SHARE
from noria.plan.load import TTFT, Fleet, Load
from noria.plan.report import Plan
from noria.plan.units import both_units, seconds

Row = tuple[str, str, str]
_MAX_WIDTH = 110


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    console.print(picture(plan), width=min(console.width, _MAX_WIDTH), highlight=False)


def picture(plan: Plan) -> RenderableType:
    """Tables of a plan's numbers, and what has to be known beside them."""
    capacity = plan.capacity
    title = f"{plan.model} in {capacity.settings.dtype} on {capacity.card.name}"
    parts: list[RenderableType] = [_heading(title), _rows([*_memory(capacity), *_use(plan)])]
    parts += [_heading("Chats at once, by their length (prompt and answer)"), _lengths(plan)]
    if plan.load is not None and plan.fleet is not None:
        parts += [_heading(_load_title(plan.load)), _rows(_load(plan, plan.load, plan.fleet))]
    notes = "\n".join(f"- {note}" for note in _notes(plan))
    return Group(*parts, Padding(Text(notes), (1, 0, 0, 0)))


def _heading(text: str) -> RenderableType:
    return Padding(Text(text, style="bold"), (1, 0, 0, 0))


def _rows(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("what", no_wrap=True)
    table.add_column("figure", no_wrap=True)
    table.add_column("how", ratio=1)
    for what, figure, how in rows:
        table.add_row(what, Text(figure, style="bold"), Text(how))
    return table


def _memory(capacity: Capacity) -> Iterator[Row]:
    shape, itemsize = capacity.shape, DTYPE_BYTES[capacity.settings.dtype]
    counts = "; ".join(f"{part.words} = {part.count:,}" for part in shape.parameters)
    yield "parameters", f"{shape.num_parameters:,}", counts
    yield (
        "weights",
        both_units(capacity.weight_bytes),
        f"{_weights(capacity)} = {capacity.weight_bytes:,} bytes; every step reads all of them "
        "once, however many chats share it",
    )
    per_token = capacity.kv_bytes_per_token
    yield (
        "KV of one token",
        f"{per_token:,} bytes",
        f"2 (K and V) x {shape.num_layers} layers x {shape.num_kv_heads} KV heads x head size "
        f"{shape.head_dim} x {itemsize} bytes = {both_units(per_token)}; kept while the chat runs",
    )
    yield "memory for KV", both_units(capacity.kv_bytes), _left(capacity)
    yield (
        "tokens that fit",
        f"{capacity.num_tokens:,}",
        f"{capacity.num_blocks:,} blocks of {capacity.settings.block_size}: {capacity.kv_bytes:,} "
        f"/ ({capacity.settings.block_size} x {capacity.kv_bytes_per_token:,}), less one block "
        "that stays empty",
    )


def _weights(capacity: Capacity) -> str:
    count, itemsize = capacity.shape.num_parameters, DTYPE_BYTES[capacity.settings.dtype]
    more = capacity.weight_bytes - count * itemsize
    if not more:
        return f"{count:,} x {itemsize} bytes"
    filled = (
        "and biases in float32, rows filled up" if capacity.settings.on_kernels else "in float32"
    )
    return f"{count:,} x {itemsize} bytes + {more:,} for norms {filled}"


def _left(capacity: Capacity) -> str:
    settings = capacity.settings
    given = settings.kv_cache_memory_bytes is not None
    if given:
        return "as given with --kv-cache-memory-bytes"
    if capacity.card.is_host:
        several = f" of each of {settings.workers} workers" if settings.workers > 1 else ""
        return (
            f"free now {both_units(capacity.card.memory)}, less the weights{several}; of what is "
            f"left {HOST_KV_SHARE:.0%}, the rest for activations and whatever else runs here"
            + (f"; divided by {settings.workers}" if settings.workers > 1 else "")
        )
    return (
        f"{both_units(capacity.card.memory)} x {settings.gpu_memory_utilization:g} = "
        f"{both_units(capacity.usable)}, less the weights, less {both_units(capacity.activations)} "
        f"for the values of a step of {settings.max_num_batched_tokens:,} positions, less "
        f"{both_units(capacity.workspace)} allowed for CUDA graphs and workspaces"
    )


def _use(plan: Plan) -> Iterator[Row]:
    capacity, length = plan.capacity, plan.chat_len
    if plan.chats is not None:
        yield (
            f"KV of {plan.chats:,} chats",
            both_units(plan.chats_kv_bytes),
            f"{plan.chats:,} x {length:,} tokens x {capacity.kv_bytes_per_token:,} bytes = "
            f"{plan.chats_kv_bytes:,} bytes; in whole blocks {plan.block_kv_bytes:,}",
        )
    yield (
        "--max-num-seqs",
        f"{capacity.suggested_max_num_seqs(length):,}",
        f"suggested for chats of {length:,} tokens: {capacity.chats_at_once(length):,} fit at "
        f"once; {_paying(capacity)}. No size is right in general: measure a few",
    )
    tokens = capacity.weights_equal_tokens
    yield (
        "KV outweighs weights",
        f"from {tokens:,} tokens",
        f"{capacity.weight_bytes:,} / {capacity.kv_bytes_per_token:,}, over all chats; with "
        f"{plan.max_num_seqs:,} chats at once from {-(-tokens // plan.max_num_seqs):,} tokens each",
    )
    floor = capacity.step_floor_s(plan.max_num_seqs, length)
    if floor is not None and capacity.card.bandwidth is not None:
        yield (
            "decode, at best",
            f"{plan.max_num_seqs / floor:,.0f} tokens/s",
            f"{plan.max_num_seqs:,} chats of {length:,} tokens: a step reads weights and KV once, "
            f"at {capacity.card.bandwidth / 1e9:,.0f} GB/s in {seconds(floor)}. Nothing is faster; "
            "what is reached has to be measured",
        )


def _paying(capacity: Capacity) -> str:
    if capacity.card.bandwidth is None or capacity.flops is None:
        return f"no more than {UNMEASURED_MAX_NUM_SEQS}, since the speed is not known"
    return (
        f"from {capacity.paying_batch:,} on a step's arithmetic takes longer than reading the "
        "weights, and another chat slows the others"
    )


def _lengths(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("tokens", "chats at once", "KV of one"):
        table.add_column(name, justify="right", no_wrap=True)
    for length in plan.lengths:
        kv = both_units(length * plan.capacity.kv_bytes_per_token)
        style = "bold" if length == plan.chat_len else ""
        table.add_row(f"{length:,}", f"{plan.capacity.chats_at_once(length):,}", kv, style=style)
    return table


def _load_title(load: Load) -> str:
    return (
        f"{load.request_rate:,g} requests/s, {load.input_len:,} tokens in and "
        f"{load.output_len:,} out each"
    )


def _load(plan: Plan, load: Load, fleet: Fleet) -> list[Row]:
    rows = [
        ("places, each replica", f"{load.max_num_seqs:,}", _places(plan)),
        (
            "decode demanded",
            f"{fleet.decode_tokens_per_s:,.0f} tokens/s",
            f"{load.request_rate:,g} requests/s x {load.output_len:,} tokens",
        ),
        (
            "replicas",
            f"{fleet.replicas:,}",
            f"{fleet.decode_tokens_per_s:,.0f} / ({load.tokens_per_s:,g} tokens/s measured x "
            f"{load.utilization:g} planned for), rounded up: each is {fleet.utilization:.0%} busy "
            f"and holds {fleet.in_flight:,.1f} requests of {load.max_num_seqs:,} on average. "
            f"{fleet.at_full_load:,} would do without any idle moment, and queue without end",
        ),
    ]
    if load.prefill_tokens_per_s is not None:
        rows.append(_prefill(plan, load))
    rows += _ttft(load, fleet)
    return rows


def _places(plan: Plan) -> str:
    if plan.max_num_seqs_given:
        return "as given with --max-num-seqs; the tokens/s have to be measured with as many"
    return (
        "assumed as suggested above, since --max-num-seqs was not given: the waits below hold for "
        "tokens/s measured with as many"
    )


def _prefill(plan: Plan, load: Load) -> Row:
    speed = f"{load.prefill_tokens_per_s:,.0f} tokens/s"
    if plan.prefill_measured:
        return "prefill", speed, "as given with --prefill-tokens-per-s"
    return (
        "prefill, estimated",
        speed,
        f"{PREFILL_EFFICIENCY:.0%} of {(plan.capacity.flops or 0) / 1e12:,.0f} TFLOP/s, over 2 "
        "operations a parameter and token and those of attention; measure it and give "
        "--prefill-tokens-per-s",
    )


def _ttft(load: Load, fleet: Fleet) -> list[Row]:
    if load.prefill_tokens_per_s is None:
        return [("TTFT", "not known", "give --prefill-tokens-per-s, prompt tokens/s measured")]
    if fleet.ttft is None:
        told = f"prompts alone need {fleet.prefill_replicas:,} replicas; {fleet.replicas:,} decode"
        return [("TTFT", "grows without end", told)]
    return list(_ttft_parts(load, fleet, fleet.ttft))


def _ttft_parts(load: Load, fleet: Fleet, ttft: TTFT) -> Iterator[Row]:
    yield "TTFT, mean", seconds(ttft.total_s), "the next three together; the network comes on top"
    yield (
        "  for a place",
        seconds(ttft.place_s),
        f"Erlang C: {load.max_num_seqs:,} places that are {fleet.utilization:.0%} taken, each for "
        f"{load.output_len:,} x {load.max_num_seqs:,} / {load.tokens_per_s:,g} s",
    )
    yield (
        "  for other prompts",
        seconds(ttft.prefill_queue_s),
        f"M/D/1: b x t / (2 (1 - b)), with b = {ttft.busy:.0%} of the time spent on prompts",
    )
    yield (
        "  prefill",
        seconds(ttft.prefill_s),
        f"t = {load.input_len:,} tokens / {load.prefill_tokens_per_s or 0:,.0f} tokens/s; a prefix "
        "that is cached takes none",
    )


def _notes(plan: Plan) -> Iterator[str]:
    shape, capacity = plan.capacity.shape, plan.capacity
    if shape.window is not None:
        yield (
            f"{shape.num_windowed_layers} of {shape.num_layers} layers see {shape.window:,} tokens "
            "only. Noria keeps all tokens in all layers; these figures count all."
        )
    if capacity.shape.max_position_embeddings < plan.chat_len:
        yield f"The model's context ends at {shape.max_position_embeddings:,} tokens."
    if plan.max_num_seqs > capacity.settings.max_num_batched_tokens:
        yield (
            f"--max-num-batched-tokens {capacity.settings.max_num_batched_tokens:,} is below "
            f"{plan.max_num_seqs:,} sequences: raise it with --max-num-seqs."
        )
    if plan.load is not None and plan.max_num_seqs > capacity.chats_at_once(plan.chat_len):
        yield (
            f"{plan.max_num_seqs:,} chats of {plan.chat_len:,} tokens do not fit: "
            f"{capacity.chats_at_once(plan.chat_len):,} run at once, the others wait or are "
            "computed again."
        )
    if plan.fleet is not None and plan.fleet.prefill_replicas > plan.fleet.replicas:
        yield (
            f"Prompts are the larger part of this load: they alone ask for "
            f"{plan.fleet.prefill_replicas:,} replicas."
        )
    if capacity.settings.on_kernels:
        yield (
            "In bfloat16 as the CPU's own kernels hold them. Without AVX2, or without a C++ "
            "compiler at the first start, a worker computes in float32: --dtype float32."
        )
    if capacity.card.is_host:
        yield "Of this computer's memory, what is free now counts; a started worker measures anew."
    else:
        yield "Arithmetic for the card alone: today's worker computes on CPUs."
    yield "A chat's KV counts for its whole length; while it is shorter, others use the room."
