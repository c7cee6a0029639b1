"""Which model computes, on which backend: the fastest that can, or the one asked for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from noria.models.config import ConfigError, ModelConfig
from noria.models.description import describe
from noria.models.kernels import kernel_weight_bytes, reasons_against
from noria.plan.memory import HostMemory
from worker.attention.base import AttentionBackend, KVCacheSpec
from worker.attention.torch_backend import TorchBackend
from worker.config import WorkerConfig
from worker.models.loader import Checkpoint, open_checkpoint
from worker.models.transformers_checkpoint import TransformersCheckpoint
from worker.native.backend import NativeBackend
from worker.native.kernels import Kernels, load_kernels
from worker.native.library import BuildError
from worker.native.model import NativeDecoder
from worker.native.variants import UnsupportedCPUError
from worker.scripted import ScriptedCache, ScriptedModel, load_scripts
from worker.sizing import Budget, CacheSize, cache_size, kv_budget

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Network:
    """A model with the backend that keeps its cache of `size`; `model` fits `backend`.

    `kernels` names the build that computes, where there are several. `passed_over` are the
    reasons why it is not the fastest backend; none if it is, or was asked for.
    """

    config: ModelConfig
    model: Any
    backend: AttentionBackend
    dtype: str
    weight_bytes: int
    size: CacheSize
    kernels: str = ""
    passed_over: tuple[str, ...] = ()


def load_network(config: WorkerConfig, memory: HostMemory, progress: Progress) -> Network:
    """Read the weights; `memory` is from before that. `progress` gets (stage, done, total).

    Raises ValueError with the reason for a model or settings that cannot be served, OSError.
    """
    load = _Load(config, memory, progress)
    checkpoint = open_checkpoint(config.model)
    if config.attention_backend == "torch":
        return load.on_torch(checkpoint)
    reasons = reasons_against(checkpoint.config, config.dtype, config.block_size)
    if not reasons and isinstance(checkpoint, Checkpoint):
        try:
            kernels = load.kernels()
        except (UnsupportedCPUError, BuildError, MemoryError) as error:
            reasons = [str(error)]
        else:
            return load.on_kernels(checkpoint, kernels)
    if config.attention_backend == "cpu_native":
        raise ValueError(f"attention_backend cpu_native cannot be used: {'; '.join(reasons)}")
    return load.on_torch(checkpoint, reasons)


def scripted_network(config: WorkerConfig, memory: HostMemory) -> Network:
    """Replays `config.script` with the sizes of `config.model`. Raises as `load_network`."""
    if config.script is None:
        raise ValueError("script is not set")
    described = describe(config.model).config
    eos = min(described.eos_token_ids, default=0)
    model = ScriptedModel(load_scripts(config.script), described.vocab_size, eos)
    backend, budget = ScriptedCache(), kv_budget(config, memory, 0)
    size = _sized(config, budget, described, model.kv_spec, backend)
    return Network(described, model, backend, "scripted", 0, size)


def _sized(
    config: WorkerConfig,
    budget: Budget,
    about: ModelConfig,
    spec: KVCacheSpec,
    backend: AttentionBackend,
) -> CacheSize:
    block_size = config.block_size or backend.default_block_size
    return cache_size(config, budget, spec, block_size, about.max_position_embeddings)


def _check_spec(planned: KVCacheSpec, asked: KVCacheSpec, where: Path) -> None:
    """The cache was sized by the config; a model that keeps something else is not served."""
    if planned != asked:
        raise ConfigError(
            f"{where}: the config describes K and V of {_told(planned)}; the model keeps "
            f"{_told(asked)}: not supported"
        )


def _told(spec: KVCacheSpec) -> str:
    dtype = str(spec.dtype).removeprefix("torch.")
    return f"{spec.num_layers} layers x {spec.num_kv_heads} KV heads x {spec.head_dim} in {dtype}"


@dataclass(frozen=True, slots=True)
class _Load:
    """One worker's settings, for whichever backend reads the weights."""

    config: WorkerConfig
    memory: HostMemory
    progress: Progress

    def kernels(self) -> Kernels:
        """Raises UnsupportedCPUError, BuildError, MemoryError."""
        stage, threads = "compiling kernels", torch.get_num_threads()
        kernels = load_kernels(self.config.cpu_kernels, threads, lambda: self.progress(stage, 0, 1))
        self.progress(stage, 1, 1)
        return kernels

    def on_kernels(self, checkpoint: Checkpoint, kernels: Kernels) -> Network:
        about, backend = checkpoint.config, NativeBackend(kernels)
        weight_bytes = kernel_weight_bytes(about, checkpoint.layout)
        size = self._size(about, torch.bfloat16, weight_bytes, backend)
        model = NativeDecoder(about, checkpoint.read(torch.bfloat16, self._loading), kernels)
        kind = kernels.variant.name
        return Network(about, model, backend, "bfloat16", model.weight_bytes, size, kind)

    def on_torch(
        self, checkpoint: Checkpoint | TransformersCheckpoint, passed_over: Iterable[str] = ()
    ) -> Network:
        name = "float32" if self.config.dtype == "auto" else self.config.dtype
        dtype: torch.dtype = getattr(torch, name)
        about, backend = checkpoint.config, TorchBackend()
        weight_bytes = checkpoint.weight_bytes(dtype)
        size = self._size(about, dtype, weight_bytes, backend)
        model = checkpoint.load(dtype, self._loading)
        _check_spec(size.spec, model.kv_spec, self.config.model)
        return Network(
            *(about, model, backend, name, weight_bytes, size), passed_over=tuple(passed_over)
        )

    def _size(
        self, about: ModelConfig, dtype: torch.dtype, weight_bytes: int, backend: AttentionBackend
    ) -> CacheSize:
        """What cannot be held is refused before gigabytes of weights are read."""
        spec = KVCacheSpec(about.num_layers, about.num_kv_heads, about.head_dim, dtype)
        budget = kv_budget(self.config, self.memory, weight_bytes)
        return _sized(self.config, budget, about, spec, backend)

    def _loading(self, done: int, total: int) -> None:
        self.progress("loading weights", done, total)
