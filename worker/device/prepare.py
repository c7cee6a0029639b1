"""From a checkpoint to a runner on a device whose memory is divided by what was measured."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from worker.attention.base import AttentionBackend, KVCacheSpec
from worker.attention.selection import Demand, Machine, choose
from worker.config import DEVICE_BACKENDS, WorkerConfig
from worker.device.errors import telling_lost_device
from worker.device.graphs import CudaRecorder, Recorder, capture_sizes
from worker.device.link import CudaLink, Link
from worker.device.memory import CudaMeter, MemoryMeter, Usage, device_budget
from worker.device.runner import DeviceRunner, Limits
from worker.flights import DeviceLostError
from worker.kv_cache import allocate_kv_cache
from worker.models.loader import Checkpoint
from worker.network import Network
from worker.sizing import cache_size
from worker.warm_up import largest_step

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Device:
    """A device with all that is asked of it. `recorder` makes one for a pool of its own."""

    machine: Machine
    link: Link
    meter: MemoryMeter
    recorder: Callable[[], Recorder]
    dtype: str

    @classmethod
    def cuda(cls) -> Self:
        """The first that torch sees. Raises RuntimeError for one that does not answer."""
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
        link, meter = CudaLink(device), CudaMeter(device)
        return cls(Machine.of(device), link, meter, CudaRecorder, dtype)


def prepare_on_device(
    config: WorkerConfig, checkpoint: Checkpoint, device: Device, progress: Progress
) -> tuple[Network, DeviceRunner[Any]]:
    """Load, measure the largest step and the graphs, take the rest for the cache, capture.

    Raises ValueError with the reason for what cannot be served, OSError.
    """
    try:
        with telling_lost_device("while it was prepared"):
            return _Preparation(config, checkpoint, device, progress).run()
    except DeviceLostError as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Preparation:
    config: WorkerConfig
    checkpoint: Checkpoint
    device: Device
    progress: Progress

    def run(self) -> tuple[Network, DeviceRunner[Any]]:
        config, about = self.config, self.checkpoint.config
        name = self.device.dtype if config.dtype == "auto" else config.dtype
        dtype: torch.dtype = getattr(torch, name)
        weight_bytes = self.checkpoint.weight_bytes(dtype)
        self._check_fits(weight_bytes)
        demand = Demand(
            dtype, about.head_dim, about.num_heads, about.num_kv_heads, config.block_size
        )
        choice = choose(config.attention_backend, demand, self.device.machine)
        backend, block_size = choice.backend, config.block_size or choice.backend.default_block_size
        model = self.checkpoint.load(dtype, self._loading, self.device.link.device)
        usage = self._measured(model, backend, block_size)
        budget = device_budget(config.kv_cache_memory_bytes, config.gpu_memory_utilization, usage)
        longest = about.max_position_embeddings
        size = cache_size(config, budget, model.kv_spec, block_size, longest)
        allocate_kv_cache(backend, size.spec, size.num_blocks + 1, block_size)
        runner = self._runner(model, backend, size.max_model_len, block_size)
        self.progress("warming up", 0, 1)
        runner.warm_up()
        self.progress("warming up", 1, 1)
        if self._captures(backend):
            runner.capture(self.device.recorder(), self._sizes, self._capturing)
        return (
            Network(
                *(about, model, backend, name, weight_bytes, size), passed_over=choice.passed_over
            ),
            runner,
        )

    def _measured(self, model: Any, backend: AttentionBackend, block_size: int) -> Usage:
        """With a cache of one block, in which all sequences of the largest step lie."""
        meter, config = self.device.meter, self.config
        longest = config.max_model_len or self.checkpoint.config.max_position_embeddings
        self.progress("measuring memory", 0, 1)
        allocate_kv_cache(backend, _spec(model), 2, block_size)
        runner = self._runner(model, backend, longest, block_size)
        meter.give_back()
        held = meter.total() - meter.free()
        before = meter.watch()
        runner.execute(
            largest_step(config.max_num_seqs, config.max_num_batched_tokens, longest, block_size)
        )
        activations = meter.peak() - before
        meter.give_back()
        graphs = self._measured_graphs(runner) if self._captures(backend) else 0
        self.progress("measuring memory", 1, 1)
        return Usage(meter.total(), held, activations, graphs)

    def _measured_graphs(self, runner: DeviceRunner[Any]) -> int:
        """The largest two are captured: the first takes the memory of the pool, the second
        what each further one costs.
        """
        meter = self.device.meter
        before, free = meter.free(), list[int]()
        largest = sorted(self._sizes)[-2:]
        runner.capture(
            self.device.recorder(), largest, lambda done, total: free.append(meter.free())
        )
        runner.release_graphs()
        meter.give_back()
        # Told before each and after all of them.
        first, further = before - free[1], free[1] - free[-1]
        return max(0, first) + max(0, further) * (len(self._sizes) - 1)

    def _check_fits(self, weight_bytes: int) -> None:
        free = self.device.meter.free()
        if weight_bytes > free:
            raise ValueError(
                f"the weights of {weight_bytes:,} bytes exceed the {free:,} that are free on the "
                "device"
            )

    def _captures(self, backend: AttentionBackend) -> bool:
        return backend.captures_decodes and not self.config.enforce_eager

    @property
    def _sizes(self) -> list[int]:
        return capture_sizes(self.config.max_num_seqs)

    def _runner(
        self, model: Any, backend: AttentionBackend, longest: int, block_size: int
    ) -> DeviceRunner[Any]:
        config = self.config
        limits = Limits(config.max_num_seqs, config.max_num_batched_tokens, longest, block_size)
        return DeviceRunner(model, backend, self.device.link, limits)

    def _loading(self, done: int, total: int) -> None:
        self.progress("loading weights", done, total)

    def _capturing(self, done: int, total: int) -> None:
        self.progress("capturing graphs", done, total)


def _spec(model: Any) -> KVCacheSpec:
    spec: KVCacheSpec = model.kv_spec
    return spec


def why_no_device(config: WorkerConfig) -> str:
    """Why no GPU can be used; empty if one can."""
    if config.attention_backend not in ("auto", *DEVICE_BACKENDS):
        return f"attention_backend {config.attention_backend} is a CPU's"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return ""
