"""From a configuration to an engine that is ready to step. Runs on the engine's thread."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import torch

from noria.service.gguf_file import read_gguf
from noria.service.protocol import PROTOCOL_VERSION
from noria.service.vocabulary import Vocabulary, load_vocabulary
from noria.v1 import worker_pb2
from worker.attention.base import AttentionBackend, KVCacheSpec
from worker.attention.torch_backend import TorchBackend
from worker.block_pool import BlockPool
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.kv_cache import KVCache, allocate_kv_cache, blocks_that_fit
from worker.model_runner import ModelRunner
from worker.models.config import ModelConfig
from worker.models.gguf_config import read_gguf_config
from worker.models.hf_config import read_hf_config
from worker.models.loader import open_checkpoint
from worker.sampling_checks import ModelLimits
from worker.scheduler import Scheduler
from worker.scripted import ScriptedCache, ScriptedModel, load_scripts

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the servicer, the log and tests know of a built engine.

    `pieces` has the bytes of each id of the vocabulary.
    """

    limits: ModelLimits
    info: worker_pb2.GetWorkerInfoResponse
    kv_cache: KVCache
    runner: ModelRunner[Any]
    scheduler: Scheduler
    pieces: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Network:
    """A model with the backend that keeps its cache; `model` fits `backend`."""

    config: ModelConfig
    model: Any
    backend: AttentionBackend
    weight_bytes: int


def build_engine(config: WorkerConfig, progress: Progress) -> tuple[Engine, WorkerFacts]:
    """Load, allocate, warm up. `progress` gets (stage, done, total).

    Raises ValueError with the reason for a model or settings that cannot be served, OSError.
    """
    torch.set_num_threads(config.cpu_threads or len(os.sched_getaffinity(0)))
    vocabulary = load_vocabulary(config.model)
    network = (_real if config.script is None else _scripted)(config, progress)
    _check_vocabulary(network.config, vocabulary)
    max_model_len, pool = _size(config, network)
    # One block more than the pool hands out: the null block.
    kv_cache = allocate_kv_cache(
        network.backend, network.model.kv_spec, pool.num_blocks + 1, pool.block_size
    )
    runner: ModelRunner[Any] = ModelRunner(network.model, network.backend, pool.block_size)
    progress("warming up", 0, 1)
    runner.warm_up()
    progress("warming up", 1, 1)
    scheduler = Scheduler(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    eos = frozenset((*network.config.eos_token_ids, *vocabulary.eos_token_ids))
    limits = ModelLimits(network.config.vocab_size, max_model_len, eos)
    info = _info(config, network, vocabulary, pool, max_model_len)
    facts = WorkerFacts(limits, info, kv_cache, runner, scheduler, vocabulary.pieces)
    return Engine(scheduler, runner, look_ahead=config.look_ahead), facts


def _real(config: WorkerConfig, progress: Progress) -> _Network:
    dtype: torch.dtype = getattr(torch, config.dtype)
    checkpoint = open_checkpoint(config.model)
    model = checkpoint.load(dtype, lambda done, total: progress("loading weights", done, total))
    weight_bytes = checkpoint.weight_bytes(dtype)
    return _Network(checkpoint.config, model, TorchBackend(), weight_bytes)


def _scripted(config: WorkerConfig, progress: Progress) -> _Network:
    del progress
    if config.script is None:
        raise ValueError("script is not set")
    path = config.model
    described = read_hf_config(path) if path.is_dir() else read_gguf_config(read_gguf(path))
    eos = min(described.eos_token_ids, default=0)
    model = ScriptedModel(load_scripts(config.script), described.vocab_size, eos)
    return _Network(described, model, ScriptedCache(), weight_bytes=0)


def _check_vocabulary(model: ModelConfig, vocabulary: Vocabulary) -> None:
    """An embedding may be padded beyond the vocabulary; a shorter one belongs to another."""
    if len(vocabulary) > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(vocabulary)} ids, the model's vocab_size is {model.vocab_size}"
        )


def _size(config: WorkerConfig, network: _Network) -> tuple[int, BlockPool]:
    """max_model_len and the pool: neither promises tokens that the other could not hold."""
    limit = network.config.max_position_embeddings
    max_model_len = config.max_model_len or limit
    if max_model_len > limit:
        raise ValueError(f"max_model_len {max_model_len} exceeds the model's {limit} positions")
    block_size = config.block_size or network.backend.default_block_size
    num_blocks = config.num_blocks or _blocks(
        config, network.model.kv_spec, block_size, max_model_len
    )
    held = num_blocks * block_size
    if held < max_model_len:
        if config.max_model_len is not None:
            raise ValueError(
                f"max_model_len {max_model_len} exceeds the {held} tokens that {num_blocks} KV "
                f"blocks of {block_size} hold"
            )
        max_model_len = held
    return max_model_len, BlockPool(num_blocks, block_size)


def _blocks(config: WorkerConfig, spec: KVCacheSpec, block_size: int, longest: int) -> int:
    """What memory allows, but no more than max_num_seqs sequences of full length use."""
    useful = config.max_num_seqs * math.ceil(longest / block_size)
    return min(useful, blocks_that_fit(spec, block_size, config.kv_cache_memory_bytes))


def _info(
    config: WorkerConfig,
    network: _Network,
    vocabulary: Vocabulary,
    pool: BlockPool,
    max_model_len: int,
) -> worker_pb2.GetWorkerInfoResponse:
    hello = worker_pb2.WorkerHello(
        protocol_version=PROTOCOL_VERSION,
        instance_id=token_hex(8),
        model=config.name,
        vocab_fingerprint=vocabulary.fingerprint,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        row_exact=network.backend.row_exact,
        default_max_tokens=config.default_max_tokens,
    )
    return worker_pb2.GetWorkerInfoResponse(
        hello=hello,
        attention_backend=network.backend.name,
        device="cpu",
        dtype=config.dtype if config.script is None else "scripted",
        weight_bytes=network.weight_bytes,
        kv_bytes_per_token=network.model.kv_spec.bytes_per_token,
        hidden_size=network.config.hidden_size,
        num_layers=network.config.num_layers,
        vocab_size=network.config.vocab_size,
    )
