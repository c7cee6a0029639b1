"""A real model for the comparisons, and a curve of its step times in its place."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.compare.drive import Driven, VirtualClock, WallClock, drive
from bench.compare.policies import Ask, Continuous, Policy
from noria.plan.memory import host_memory
from worker.block_pool import BlockPool
from worker.config import WorkerConfig
from worker.kv_cache import allocate_kv_cache
from worker.model_runner import ModelRunner
from worker.network import load_network
from worker.scheduler import Scheduler
from worker.scores import StepResult
from worker.sequence import SampledToken, SchedulerOutput

BLOCK_SIZE = 16
_CURVE_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CURVE_CONTEXT = 40
_CURVE_STEPS = 8
_PROMPT = 256


class BenchedEngine:
    """A model with a cache of `num_blocks`; each run has a scheduler of its own."""

    def __init__(self, model: Path, num_blocks: int, max_model_len: int, cpu_threads: int) -> None:
        """Raises ValueError and OSError as the worker does."""
        config = WorkerConfig(
            model, num_blocks=num_blocks, max_model_len=max_model_len, cpu_threads=cpu_threads
        )
        network = load_network(config, host_memory(), lambda stage, done, total: None)
        allocate_kv_cache(network.backend, network.size.spec, num_blocks + 1, BLOCK_SIZE)
        self.runner: ModelRunner[Any] = ModelRunner(network.model, network.backend, BLOCK_SIZE)
        self.runner.warm_up()
        self.num_blocks, self.max_model_len = num_blocks, max_model_len
        self.vocab_size = network.config.vocab_size

    def scheduler(self, places: int, *, budget: int = 512, caches: bool = False) -> Scheduler:
        """An empty one."""
        return Scheduler(
            BlockPool(self.num_blocks, BLOCK_SIZE),
            max_num_seqs=places,
            max_num_batched_tokens=max(budget, places),
            max_model_len=self.max_model_len,
            enable_prefix_caching=caches,
        )

    def run(self, asks: Sequence[Ask], policy: Policy, scheduler: Scheduler) -> Driven:
        """Serve them for real."""
        return drive(asks, policy, scheduler, self.runner, WallClock())


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Seconds of a step: `decode` by the number of sequences, and per prompt position."""

    decode: tuple[tuple[int, float], ...]
    position_s: float

    def seconds(self, decodes: int, prompt_positions: int) -> float:
        """Between measured sizes on a straight line; beyond the last as on the one before."""
        return self._decode_s(decodes) + prompt_positions * self.position_s

    def _decode_s(self, decodes: int) -> float:
        if decodes <= self.decode[0][0] or len(self.decode) == 1:
            return self.decode[0][1] if decodes else 0.0
        lines = list(pairwise(self.decode))
        (low, before), (high, after) = next(
            (line for line in lines if decodes <= line[1][0]), lines[-1]
        )
        return before + (decodes - low) / (high - low) * (after - before)


def measure_curve(engine: BenchedEngine, most: int) -> StepCurve:
    """Decode steps of batches up to `most`, or to as many as the cache holds, and what a
    prompt's position takes.
    """
    # A sequence enters only if it finds a spare block besides.
    most = min(most, engine.num_blocks // (-(-(_CURVE_CONTEXT + _CURVE_STEPS) // BLOCK_SIZE) + 1))
    sizes = [size for size in _CURVE_BATCHES if size < most] + [most]
    decode = tuple((size, _decode_s(engine, size)) for size in sizes)
    prompt = min(_PROMPT, engine.max_model_len - 1)
    ask = Ask((7,) * prompt, 1)
    took = median(
        _seconds(lambda: engine.run([ask], Continuous(1), engine.scheduler(1))) for _ in "abc"
    )
    return StepCurve(decode, took / prompt)


def predicted(
    asks: Sequence[Ask], policy: Policy, scheduler: Scheduler, curve: StepCurve
) -> Driven:
    """What the curve says that a run takes."""
    clock = VirtualClock()
    return drive(asks, policy, scheduler, _Predicted(curve, clock), clock)


class _Predicted:
    def __init__(self, curve: StepCurve, clock: VirtualClock) -> None:
        self._curve, self._clock = curve, clock

    def execute(self, output: SchedulerOutput) -> StepResult:
        decodes = sum(len(entry.token_ids) == 1 for entry in output.scheduled)
        took = self._curve.seconds(decodes, output.num_tokens - decodes)
        self._clock.wait_until(self._clock.now() + took)
        drawing = (entry.sequence_id for entry in output.scheduled if entry.draw is not None)
        return StepResult({number: SampledToken(1) for number in drawing}, {})


def _decode_s(engine: BenchedEngine, size: int) -> float:
    asks = [Ask((9, *range(_CURVE_CONTEXT - 1)), _CURVE_STEPS + 1) for _ in range(size)]
    driven = engine.run(asks, Continuous(size), engine.scheduler(size))
    return median(s.took_s for s in driven.steps if s.is_decode and s.sequences == size)


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
