"""The engine as a whole: graphs against eager steps, and tokens per second of an 8B shape."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.gpu.rows import SKIPPED, Row, Unfit, attempt
from bench.gpu.setting import Setting, runnable
from noria.models.config import DecoderConfig
from noria.models.registry import family_of
from worker.attention.base import AttentionBackend, KVCacheSpec
from worker.block_pool import BlockPool
from worker.device.graphs import CudaRecorder
from worker.device.link import CudaLink, HostLink
from worker.device.runner import DeviceRunner, Limits
from worker.engine import Engine
from worker.kv_cache import allocate_kv_cache
from worker.models.registry import BUILDERS
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams
from worker.sequence import Sequence as Request

_DECODED = 64
_BATCHED_TOKENS = 8192
# Llama 3's of 8B; the smaller one is for comparisons.
_LARGE = (128_256, 4096, 32, 32, 8, 128, 14_336)
_SMALL = (32_000, 1024, 4, 8, 2, 128, 2816)
_TINY = (97, 32, 1, 2, 1, 16, 48)


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests of so many prompt tokens, each of which gets `decoded` more."""

    batch: int
    context: int
    decoded: int = _DECODED

    @property
    def longest(self) -> int:
        return self.context + self.decoded + 2


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds until every request had its first token, and of one step after that."""

    prefill_s: float
    step_s: float


def described(sizes: tuple[int, ...], longest: int) -> DecoderConfig:
    vocab, hidden, layers, heads, kv_heads, head_dim, intermediate = sizes
    return DecoderConfig(
        architecture="llama", vocab_size=vocab, hidden_size=hidden, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, max_position_embeddings=longest,
        eos_token_ids=frozenset(), intermediate_size=intermediate, rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )  # fmt: skip


def random_model(setting: Setting, config: DecoderConfig) -> tuple[Any, int]:
    """A model of random weights on the device, and their bytes. Raises Unfit."""
    shapes = {p.name: p.shape for p in family_of(config.architecture).parameters(config)}
    size = sum(torch.Size(shape).numel() for shape in shapes.values()) * setting.dtype.itemsize
    if size > 0.9 * setting.free_bytes:
        raise Unfit(f"{size:,} bytes of weights, {setting.free_bytes:,} are free")
    generator = torch.Generator(setting.device).manual_seed(1)
    parameters = {}
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=setting.dtype, device=setting.device)
        is_norm = len(shape) == 1
        parameters[name] = (
            tensor.fill_(1) if is_norm else tensor.normal_(0, 0.05, generator=generator)
        )
    return BUILDERS[config.architecture](config, parameters), size


class _Again:
    """On a host nothing can be captured: a replay computes the step again."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        self._step, self.given = step, step()

    def replay(self) -> None:
        self.given = self._step()


class _HostRecorder:
    def record(self, step: Callable[[], torch.Tensor]) -> _Again:
        return _Again(step)


class Served:
    """A model behind a real scheduler and engine, with a cache for one load."""

    def __init__(
        self,
        setting: Setting,
        model: Any,
        backend: AttentionBackend,
        load: Load,
        captured: Sequence[int],
    ) -> None:
        spec, size = model.kv_spec, backend.default_block_size
        # One more each: the scheduler takes nobody in who might soon be put out again.
        blocks = load.batch * (-(-load.longest // size) + 1)
        needed = (blocks + 1) * size * spec.bytes_per_token
        if needed > 0.8 * setting.free_bytes:
            raise Unfit(f"{needed:,} bytes of keys and values, {setting.free_bytes:,} are free")
        allocate_kv_cache(backend, spec, blocks + 1, size)
        link = CudaLink(setting.device) if setting.is_cuda else HostLink()
        tokens = 64 if setting.tiny else _BATCHED_TOKENS
        limits = Limits(load.batch, max(tokens, load.batch), load.longest, size)
        self._runner = DeviceRunner(model, backend, link, limits)
        if captured:
            recorder: Any = CudaRecorder() if setting.is_cuda else _HostRecorder()
            self._runner.capture(recorder, captured)
        scheduler = Scheduler(
            BlockPool(blocks, size), max_num_seqs=load.batch,
            max_num_batched_tokens=limits.max_num_batched_tokens, max_model_len=load.longest,
            enable_prefix_caching=False,
        )  # fmt: skip
        self._engine = Engine(scheduler, self._runner, look_ahead=max(1, load.batch), steps_ahead=1)
        self._vocab = model.config.vocab_size

    def submit(self, number: int, context: int, max_tokens: int) -> None:
        """A greedy request of a prompt of its own."""
        prompt = [(number * 131 + at * 7) % self._vocab for at in range(context)]
        sampling = SamplingParams(temperature=0.0)
        request = Request(number, prompt, sampling, max_tokens, number)
        self._engine.submit(request, time.monotonic())

    def step(self) -> dict[int, int]:
        """The token that each request got. Raises what the step raised."""
        output = self._engine.step()
        if output.failure is not None:
            raise output.failure
        return {u.sequence.sequence_id: u.token.token_id for u in output.updates if u.token}

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def pace(self, load: Load) -> Pace:
        """Of the load from its first step on."""
        for number in range(load.batch):
            self.submit(number, load.context, load.decoded)
        counts, started = dict.fromkeys(range(load.batch), 0), time.perf_counter()
        while min(counts.values()) < 1:
            _count(counts, self.step())
        first = time.perf_counter()
        before = sum(counts.values())
        while max(counts.values()) < load.decoded:
            _count(counts, self.step())
        taken = time.perf_counter() - first
        # A step more or less of some requests, where prompts were computed one after the other.
        steps = (sum(counts.values()) - before) / load.batch
        return Pace(first - started, taken / steps)


def _count(counts: dict[int, int], told: dict[int, int]) -> None:
    for number in told:
        counts[number] += 1


def engine(setting: Setting) -> Iterator[Row]:
    """Tokens per second of the whole engine on an 8B shape, on the first backend that runs."""
    loads = [Load(1, 512), Load(32, 512), Load(256, 512), Load(32, 4096)]
    if setting.tiny:
        loads = [Load(2, 12, 3)]
    name, make = next(iter(runnable(setting)))
    made: list[tuple[Any, int]] = []

    def build() -> Row:
        config = described(_TINY if setting.tiny else _LARGE, max(load.longest for load in loads))
        started = time.perf_counter()
        made.append(random_model(setting, config))
        return Row("", "", seconds=time.perf_counter() - started, note=f"{made[0][1]:,} bytes")

    yield attempt("engine", "random weights", build)
    for load in loads:
        label = f"{name}: {load.batch} x {load.context}"
        if not made or setting.is_over:
            yield Row("engine", label, SKIPPED, note="no time left" if made else "no weights")
            continue
        yield from _paced(setting, *made[0], make, load, label)


def _paced(
    setting: Setting,
    model: Any,
    weight_bytes: int,
    make: Callable[[], AttentionBackend],
    load: Load,
    label: str,
) -> Iterator[Row]:
    paces: list[Pace] = []
    itemsize, spec = setting.dtype.itemsize, model.kv_spec

    def decode() -> Row:
        served = Served(setting, model, make(), load, [load.batch])
        paces.append(served.pace(load))
        return _decode_row(spec, load, weight_bytes, itemsize, paces[0])

    yield attempt("engine", f"{label}, decode", decode)
    if paces:
        tokens = load.batch * load.context
        flops = 2 * tokens * weight_bytes / itemsize
        seconds = paces[0].prefill_s
        yield Row("engine", f"{label}, prefill", seconds=seconds, tokens=tokens, computed=flops)


def _decode_row(spec: KVCacheSpec, load: Load, weight_bytes: int, itemsize: int, pace: Pace) -> Row:
    """A step reads the weights once, and every request's keys and values."""
    read = weight_bytes + load.batch * load.context * spec.bytes_per_token
    return Row(
        "", "", seconds=pace.step_s, tokens=load.batch, moved=read,
        computed=2 * load.batch * weight_bytes / itemsize,
    )  # fmt: skip


def graphs(setting: Setting) -> Iterator[Row]:
    """Streams of captured steps against those of eager ones, while the batch shrinks."""
    config = described(_TINY if setting.tiny else _SMALL, 200)
    model, _ = random_model(setting, config)
    load = Load(2, 8, 2) if setting.tiny else Load(6, 100, 60)
    most = load.batch
    for name, make in runnable(setting):
        for label, captured in (
            ("each size captured", range(1, most + 1)), (f"padded to {most}", [most]),
        ):  # fmt: skip
            told = f"{name}: {label}"
            if not make().captures_decodes:
                yield Row("graphs", told, SKIPPED, note="its decodes are not captured")
            elif setting.is_over:
                yield Row("graphs", told, SKIPPED, note="no time left")
            else:
                yield attempt(
                    "graphs", told, partial(_compared, setting, model, make, load, captured)
                )


def _compared(
    setting: Setting,
    model: Any,
    make: Callable[[], AttentionBackend],
    load: Load,
    captured: Sequence[int],
) -> Row:
    """Raises AssertionError if streams differ where every size is captured.

    Padding changes the sizes of matrix products, and with them their rounding: there, streams
    may part, and the share of equal tokens is told.
    """
    eager = _streams(setting, model, make, load, ())
    replayed = _streams(setting, model, make, load, captured)
    pairs = [
        (ours, theirs)
        for key in eager
        for ours, theirs in zip(replayed[key], eager[key], strict=True)
    ]
    equal = sum(ours == theirs for ours, theirs in pairs)
    told = f"{equal} of {len(pairs)} tokens equal"
    if equal < len(pairs) and len(captured) > 1:
        raise AssertionError(told)
    return Row("", "", note=told)


def _streams(
    setting: Setting,
    model: Any,
    make: Callable[[], AttentionBackend],
    load: Load,
    captured: Sequence[int],
) -> dict[int, list[int]]:
    """Requests of different lengths that end one after the other."""
    served = Served(setting, model, make(), load, captured)
    for number in range(load.batch):
        context, decoded = (
            1 + number * most // load.batch for most in (load.context, load.decoded)
        )
        served.submit(number, context, decoded)
    told: dict[int, list[int]] = {number: [] for number in range(load.batch)}
    while served.has_work:
        for number, token in served.step().items():
            told[number].append(token)
    return told
