"""From a configuration to an engine that is ready to step. Runs on the engine's thread."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import torch

from noria.models.config import ModelConfig
from noria.plan.memory import host_memory
from noria.service.protocol import PROTOCOL_VERSION
from noria.service.vocabulary import Vocabulary, load_vocabulary
from noria.v1 import worker_pb2
from worker.allocator import keep_freed_memory
from worker.block_pool import BlockPool
from worker.config import DEVICE_BACKENDS, WorkerConfig
from worker.device.prepare import Device, prepare_on_device, why_no_device
from worker.device.runner import DeviceRunner
from worker.engine import Engine
from worker.grammar.line import NO_COMPILER, Compiler
from worker.grammar.tokens import TokenTable
from worker.kv_cache import allocate_kv_cache
from worker.model_runner import ModelRunner
from worker.models.loader import Checkpoint, open_checkpoint
from worker.network import Network, load_network, scripted_network
from worker.sampling_checks import ModelLimits
from worker.scheduler import Scheduler
from worker.sizing import CacheSize

Progress = Callable[[str, int, int], None]
_FOREIGN = "transformers' own code computes the model, so far on a CPU alone"
AnyRunner = ModelRunner[Any] | DeviceRunner[Any]


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the servicer, the log and tests know of a built engine.

    `pieces` has the bytes of each id of the vocabulary.
    """

    limits: ModelLimits
    info: worker_pb2.GetWorkerInfoResponse
    cache_size: CacheSize
    runner: AnyRunner
    scheduler: Scheduler
    pieces: tuple[bytes, ...]
    network: Network


def build_engine(
    config: WorkerConfig,
    progress: Progress,
    make_compiler: Callable[[TokenTable], Compiler] = lambda table: NO_COMPILER,
) -> tuple[Engine, WorkerFacts]:
    """Load, allocate, warm up. `progress` gets (stage, done, total).

    Raises ValueError with the reason for a model or settings that cannot be served, OSError.
    """
    keep_freed_memory()
    torch.set_num_threads(config.cpu_threads or len(os.sched_getaffinity(0)))
    progress("reading the vocabulary", 0, 1)
    vocabulary = load_vocabulary(config.model)
    network, runner = _prepared(config, vocabulary, progress)
    size = network.size
    scheduler = _scheduler(config, BlockPool(size.num_blocks, size.block_size), size)
    eos = frozenset((*network.config.eos_token_ids, *vocabulary.eos_token_ids))
    limits = ModelLimits(network.config.vocab_size, size.max_model_len, eos)
    info = _info(config, network, vocabulary, "cuda" if is_on_device(runner) else "cpu")
    facts = WorkerFacts(limits, info, size, runner, scheduler, vocabulary.pieces, network)
    progress("indexing the vocabulary", 0, 1)
    compiler = make_compiler(_token_table(vocabulary, limits))
    progress("indexing the vocabulary", 1, 1)
    ahead = is_on_device(runner) if config.async_scheduling is None else config.async_scheduling
    engine = Engine(
        scheduler,
        runner,
        look_ahead=config.look_ahead,
        steps_ahead=int(ahead),
        compiler=compiler,
    )
    return engine, facts


def is_on_device(runner: AnyRunner) -> bool:
    """Whether steps are computed behind the host's back."""
    return isinstance(runner, DeviceRunner)


def _prepared(
    config: WorkerConfig, vocabulary: Vocabulary, progress: Progress
) -> tuple[Network, AnyRunner]:
    """A network with its cache, and a runner that is warm."""
    memory = host_memory()
    if config.script is not None:
        return _on_host(scripted_network(config, memory), vocabulary, progress)
    if config.may_use_device:
        reason = why_no_device(config)
        checkpoint = None if reason else open_checkpoint(config.model)
        if isinstance(checkpoint, Checkpoint):
            _check_vocabulary(checkpoint.config, vocabulary)
            return prepare_on_device(config, checkpoint, Device.cuda(), progress)
        if config.device == "cuda" or config.attention_backend in DEVICE_BACKENDS:
            raise ValueError(f"no GPU can be used: {reason or _FOREIGN}")
    return _on_host(load_network(config, memory, progress), vocabulary, progress)


def _on_host(
    network: Network, vocabulary: Vocabulary, progress: Progress
) -> tuple[Network, AnyRunner]:
    _check_vocabulary(network.config, vocabulary)
    size = network.size
    # One block more than the pool hands out: the null block.
    allocate_kv_cache(network.backend, size.spec, size.num_blocks + 1, size.block_size)
    runner: ModelRunner[Any] = ModelRunner(network.model, network.backend, size.block_size)
    progress("warming up", 0, 1)
    runner.warm_up()
    progress("warming up", 1, 1)
    return network, runner


def _scheduler(config: WorkerConfig, pool: BlockPool, size: CacheSize) -> Scheduler:
    return Scheduler(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=size.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def _token_table(vocabulary: Vocabulary, limits: ModelLimits) -> TokenTable:
    return TokenTable(
        pieces=vocabulary.pieces,
        special_ids=[i for i, special in enumerate(vocabulary.is_special) if special],
        eos_ids=sorted(i for i in limits.eos_token_ids if i < len(vocabulary)),
        size=limits.vocab_size,
    )


def _check_vocabulary(model: ModelConfig, vocabulary: Vocabulary) -> None:
    """An embedding may be padded beyond the vocabulary; a shorter one belongs to another."""
    if len(vocabulary) > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(vocabulary)} ids, the model's vocab_size is {model.vocab_size}"
        )


def _info(
    config: WorkerConfig,
    network: Network,
    vocabulary: Vocabulary,
    device: str,
) -> worker_pb2.GetWorkerInfoResponse:
    size = network.size
    hello = worker_pb2.WorkerHello(
        protocol_version=PROTOCOL_VERSION,
        instance_id=token_hex(8),
        model=config.name,
        aliases=config.aliases,
        vocab_fingerprint=vocabulary.fingerprint,
        max_model_len=size.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=size.block_size,
        num_blocks=size.num_blocks,
        row_exact=network.backend.row_exact,
        default_max_tokens=config.default_max_tokens,
        yields_places=True,
    )
    return worker_pb2.GetWorkerInfoResponse(
        hello=hello,
        attention_backend=network.backend.name,
        rejected_backends=network.passed_over,
        device=device,
        dtype=network.dtype,
        weight_bytes=network.weight_bytes,
        kv_bytes_per_token=size.spec.bytes_per_token,
        kv_cache_memory_bytes=size.num_bytes,
        kv_cache_arithmetic=size.arithmetic(),
        hidden_size=network.config.hidden_size,
        num_layers=network.config.num_layers,
        vocab_size=network.config.vocab_size,
    )
