"""The engine alone: scheduler, model and sampler on one thread, no wire and no text.

Every backend in turn, in one process, several rounds; medians of steps. Beside each figure stands
how near it comes to what the computer can do, measured in the same run: a step has to read
the weights and the batch's keys and values, and to multiply.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import torch

from bench.table import print_table
from noria.cli.model_source import DEFAULT_MODEL, resolve_model
from noria.plan.memory import host_memory
from worker.block_pool import BlockPool
from worker.config import CPU_KERNELS, WorkerConfig
from worker.input_batch import build_input_batch
from worker.kv_cache import allocate_kv_cache
from worker.model_runner import ModelRunner
from worker.network import Network, load_network
from worker.scheduler import Scheduler
from worker.scores import StepResult
from worker.sequence import SampledToken, SamplingParams, SchedulerOutput, Sequence

_BLOCK_SIZE = 16
_STREAMED_BYTES = 1 << 30
_PEAK_SIZE = 2048
_FILLED_TOGETHER = 512
_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Machine:
    """What this computer does at best, with the engine's threads: bytes/s read, FLOP/s."""

    bytes_per_s: float
    bf16_flops: float
    fp32_flops: float


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps of one batch size: median seconds, all together and of this process's CPU time."""

    step_s: float
    cpu_s: float


class Contender:
    """A backend with its cache, ready to decode."""

    def __init__(self, label: str, network: Network, num_blocks: int) -> None:
        self.label, self.network, self._num_blocks = label, network, num_blocks
        allocate_kv_cache(network.backend, network.size.spec, num_blocks + 1, _BLOCK_SIZE)
        self._runner = ModelRunner(network.model, network.backend, _BLOCK_SIZE)

    def decode(self, batch: int, context: int, steps: int) -> Pace:
        """`batch` sequences of about `context` tokens, `steps` steps of one position each."""
        scheduler = Scheduler(
            BlockPool(self._num_blocks, _BLOCK_SIZE),
            max_num_seqs=batch, max_num_batched_tokens=max(_FILLED_TOGETHER, batch),
            max_model_len=2 * context + steps, enable_prefix_caching=False,
        )  # fmt: skip
        prompt = max(context - steps // 2, 1)
        sequences = [
            Sequence(index, [1 + index] * prompt, SamplingParams(temperature=0.0), context, index)
            for index in range(batch)
        ]
        for sequence in sequences:
            scheduler.add(sequence)
        while any(sequence.num_uncomputed_tokens > 1 for sequence in sequences):
            self._fill(scheduler)
        return _median([self._step(scheduler) for _ in range(steps)])

    def _step(self, scheduler: Scheduler) -> Pace:
        wall, cpu = time.perf_counter(), time.process_time()
        output = _scheduled(scheduler)
        scheduler.update(output, self._runner.execute(output))
        return Pace(time.perf_counter() - wall, time.process_time() - cpu)

    def _fill(self, scheduler: Scheduler) -> None:
        """Random keys and values in place of a prefill, which is not what is measured."""
        output, spec = _scheduled(scheduler), self.network.size.spec
        backend, batch = self.network.backend, build_input_batch(output, _BLOCK_SIZE)
        backend.plan(batch.metadata)
        shape = (output.num_tokens, spec.num_kv_heads, spec.head_dim)
        for layer in range(spec.num_layers):
            backend.write_kv(layer, *torch.randn(2, *shape).to(spec.dtype))
        drawing = (entry.sequence_id for entry in output.scheduled if entry.draw is not None)
        scheduler.update(output, StepResult({index: SampledToken(1) for index in drawing}, {}))


def _scheduled(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    if output is None:
        raise RuntimeError("the sequences ended before they were measured")
    return output


def _median(paces: Iterable[Pace]) -> Pace:
    paces = list(paces)
    return Pace(median(p.step_s for p in paces), median(p.cpu_s for p in paces))


def floor_s(network: Network, machine: Machine, batch: int, context: int) -> float:
    """The longer of reading all that a step must read and multiplying all that it must."""
    itemsize = network.size.spec.dtype.itemsize
    read = network.weight_bytes + batch * context * network.size.spec.bytes_per_token
    flops = 2 * batch * network.weight_bytes / itemsize
    peak = (
        machine.fp32_flops
        if network.dtype == "float32"
        else max(machine.fp32_flops, machine.bf16_flops)
    )
    return max(read / machine.bytes_per_s, flops / peak)


def measure_machine() -> Machine:
    """Sums of a large tensor, and products of square matrices in bf16 and fp32."""
    large = torch.ones(_STREAMED_BYTES // 4)
    streamed = min(_seconds(large.sum) for _ in range(5))
    bf16, fp32 = (_flops(torch.ones(_PEAK_SIZE, _PEAK_SIZE, dtype=dtype)) for dtype in _DTYPES)
    return Machine(_STREAMED_BYTES / streamed, bf16, fp32)


def _flops(square: torch.Tensor) -> float:
    return 2 * _PEAK_SIZE**3 / min(_seconds(lambda: square @ square) for _ in range(5))


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def contenders(model: Path, labels: Iterable[str], num_blocks: int) -> Iterator[Contender]:
    """`torch`, or a variant of cpu_native; one that this CPU lacks is left out, and said."""
    for label in labels:
        is_torch = label == "torch"
        config = WorkerConfig(
            model=model, num_blocks=num_blocks, max_model_len=16,
            attention_backend="torch" if is_torch else "cpu_native",
            cpu_kernels="auto" if is_torch else label,
        )  # fmt: skip
        try:
            network = load_network(config, host_memory(), lambda stage, done, total: None)
        except ValueError as error:
            click.echo(f"{label}: {error}", err=True)
            continue
        yield Contender(label, network, num_blocks)


@click.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
@click.option("--backend", "labels", multiple=True, default=("torch", *CPU_KERNELS[1:]))
@click.option("--batch", "batches", multiple=True, default=(1, 4, 8, 16, 32, 64), type=int)
@click.option("--context", default=300, show_default=True, type=click.IntRange(2))
@click.option("--steps", default=20, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--cpu-threads", default=len(os.sched_getaffinity(0)), show_default=True)
def main(
    model: str,
    labels: tuple[str, ...],
    batches: tuple[int, ...],
    context: int,
    steps: int,
    rounds: int,
    cpu_threads: int,
) -> None:
    """Tokens per second of the engine alone, by batch size, each backend in turn."""
    torch.set_num_threads(cpu_threads)
    path = resolve_model(model, lambda text: click.echo(text, err=True)).path
    num_blocks = max(batches) * -(-(context + 2 * steps) // _BLOCK_SIZE)
    runners = list(contenders(path, labels, num_blocks))
    load_before, machine = os.getloadavg(), measure_machine()
    rows = []
    for batch in batches:
        paces: dict[str, list[Pace]] = {runner.label: [] for runner in runners}
        for _ in range(rounds):
            for runner in runners:
                paces[runner.label].append(runner.decode(batch, context, steps))
        rows += [_row(runner, machine, batch, context, paces[runner.label]) for runner in runners]
    click.echo(
        f"{cpu_threads} threads; reads {machine.bytes_per_s / 1e9:.1f} GB/s, multiplies "
        f"{machine.bf16_flops / 1e9:.0f} GFLOP/s in bf16, {machine.fp32_flops / 1e9:.0f} in fp32; "
        f"load {load_before[0]:.1f} before, {os.getloadavg()[0]:.1f} after"
    )
    print_table(_COLUMNS[0], list(_COLUMNS[1:]), rows)


_COLUMNS = ("batch", "tokens/s", "step ms", "CPU ms", "floor ms", "of floor")


def _row(
    runner: Contender, machine: Machine, batch: int, context: int, paces: list[Pace]
) -> list[str]:
    pace, floor = _median(paces), floor_s(runner.network, machine, batch, context)
    figures = (f"{batch / pace.step_s:.0f}", f"{pace.step_s * 1e3:.2f}", f"{pace.cpu_s * 1e3:.2f}")
    return [f"{batch} {runner.label}", *figures, f"{floor * 1e3:.2f}", f"{floor / pace.step_s:.0%}"]


if __name__ == "__main__":
    main()
