"""Which model computes, on which backend: the fastest that can, or the one asked for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from noria.plan.memory import HostMemory
from noria.service.gguf_file import read_gguf
from worker.attention.base import AttentionBackend, KVCacheSpec
from worker.attention.torch_backend import TorchBackend
from worker.config import WorkerConfig
from worker.models.config import ModelConfig
from worker.models.gguf_config import read_gguf_config
from worker.models.hf_config import read_hf_config
from worker.models.loader import Checkpoint, open_checkpoint
from worker.models.transformers_checkpoint import TransformersCheckpoint
from worker.native.backend import GROUP, NativeBackend
from worker.native.kernels import Kernels, load_kernels
from worker.native.library import BuildError
from worker.native.model import NativeDecoder, reasons_against
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
    reasons = _reasons_against_native(config, checkpoint)
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
    path = config.model
    described = read_hf_config(path) if path.is_dir() else read_gguf_config(read_gguf(path))
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


def _reasons_against_native(
    config: WorkerConfig, checkpoint: Checkpoint | TransformersCheckpoint
) -> list[str]:
    reasons = []
    if config.dtype not in ("auto", "bfloat16"):
        reasons.append(f"dtype {config.dtype} was asked for, its weights are bfloat16")
    if config.block_size is not None and config.block_size % GROUP:
        reasons.append(f"block_size {config.block_size} is no multiple of {GROUP}")
    if isinstance(checkpoint, TransformersCheckpoint):
        return [*reasons, "the model is computed by transformers' own code"]
    return reasons + reasons_against(checkpoint.config)


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
        size = self._size(checkpoint, torch.bfloat16, backend)
        model = NativeDecoder(about, checkpoint.read(torch.bfloat16, self._loading), kernels)
        kind = kernels.variant.name
        return Network(about, model, backend, "bfloat16", model.weight_bytes, size, kind)

    def on_torch(
        self, checkpoint: Checkpoint | TransformersCheckpoint, passed_over: Iterable[str] = ()
    ) -> Network:
        name = "float32" if self.config.dtype == "auto" else self.config.dtype
        dtype: torch.dtype = getattr(torch, name)
        about, backend = checkpoint.config, TorchBackend()
        size = self._size(checkpoint, dtype, backend)
        model, weight_bytes = checkpoint.load(dtype, self._loading), checkpoint.weight_bytes(dtype)
        return Network(
            *(about, model, backend, name, weight_bytes, size), passed_over=tuple(passed_over)
        )

    def _size(
        self,
        checkpoint: Checkpoint | TransformersCheckpoint,
        dtype: torch.dtype,
        backend: AttentionBackend,
    ) -> CacheSize:
        """What cannot be held is refused before gigabytes of weights are read."""
        about = checkpoint.config
        spec = KVCacheSpec(about.num_layers, about.num_kv_heads, about.head_dim, dtype)
        budget = kv_budget(self.config, self.memory, checkpoint.weight_bytes(dtype))
        return _sized(self.config, budget, about, spec, backend)

    def _loading(self, done: int, total: int) -> None:
        self.progress("loading weights", done, total)
