"""How many KV blocks a worker takes, and why: from the memory left, or as given."""

from dataclasses import dataclass

from noria.plan.kv import HOST_KV_SHARE, blocks_of, blocks_that_fit, host_kv_bytes
from noria.plan.memory import HostMemory
from noria.plan.units import exact_bytes
from worker.attention.base import KVCacheSpec
from worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes for keys and values, and how they came about. `most` is what memory can hold."""

    num_bytes: int
    reason: str
    most: int


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What sequences get: `num_blocks` is without the null block.

    Neither it nor max_model_len promises tokens that the other could not hold.
    """

    spec: KVCacheSpec
    num_blocks: int
    block_size: int
    max_model_len: int
    reason: str

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Of all blocks, the null block included."""
        return (self.num_blocks + 1) * self.block_size * self.spec.bytes_per_token

    def arithmetic(self) -> str:
        """How the size comes about, for people."""
        spec = self.spec
        return (
            f"2 (K, V) x {spec.num_layers} layers x {spec.num_kv_heads} KV heads x "
            f"{spec.head_dim} x {spec.dtype.itemsize} bytes = {spec.bytes_per_token:,} bytes a "
            f"token; {self.num_blocks:,} blocks x {self.block_size} tokens = "
            f"{self.num_tokens:,} tokens; with the null block {exact_bytes(self.num_bytes)}; "
            f"so many because of {self.reason}"
        )


def kv_budget(config: WorkerConfig, memory: HostMemory, weight_bytes: int) -> Budget:
    """Decided before weights are read; `memory` is from before any were.

    Raises ValueError with both sizes if the weights, or they and a cache of the given size,
    of all workers on this computer exceed what is free.
    """
    given, count = config.kv_cache_memory_bytes, config.local_workers
    most = memory.available // count - weight_bytes
    if given is not None:
        _check_given(given, weight_bytes, count, memory)
        return Budget(given, f"kv_cache_memory_bytes = {exact_bytes(given)}", most)
    each = host_kv_bytes(memory.available, weight_bytes, count)
    workers = "" if count == 1 else f"{count} workers x "
    divided = "" if count == 1 else f" / {count} workers"
    return Budget(
        each,
        f"({memory.available:,} bytes free ({memory.limit}) - {workers}{weight_bytes:,} of weights)"
        f" x {HOST_KV_SHARE:g}{divided} = {exact_bytes(each)}",
        most,
    )


def _check_given(given: int, weight_bytes: int, count: int, memory: HostMemory) -> None:
    needed = count * (given + weight_bytes)
    if needed > memory.available:
        each = "" if count == 1 else f" of each of {count} workers"
        raise ValueError(
            f"kv_cache_memory_bytes {given:,} and weights of {weight_bytes:,} bytes{each} need "
            f"{needed:,} bytes; {memory.available:,} are free ({memory.limit})"
        )


def cache_size(
    config: WorkerConfig, budget: Budget, spec: KVCacheSpec, block_size: int, longest: int
) -> CacheSize:
    """`longest`: positions of the model. What memory allows, but no more than max_num_seqs
    sequences of full length use. Raises ValueError naming the limit and both numbers.
    """
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ValueError(f"max_model_len {max_model_len} exceeds the model's {longest} positions")
    num_blocks, reason = _blocks(config, budget, spec, block_size, max_model_len)
    held = num_blocks * block_size
    if held < max_model_len and config.max_model_len is not None:
        per_token = spec.bytes_per_token
        raise ValueError(
            f"max_model_len {max_model_len:,} exceeds the {held:,} tokens that {num_blocks:,} KV "
            f"blocks of {block_size} hold: it needs {max_model_len * per_token:,} bytes, there are "
            f"{held * per_token:,} ({reason})"
        )
    return CacheSize(spec, num_blocks, block_size, min(held, max_model_len), reason)


def _blocks(
    config: WorkerConfig, budget: Budget, spec: KVCacheSpec, block_size: int, longest: int
) -> tuple[int, str]:
    if config.num_blocks is not None:
        _check_num_blocks(config.num_blocks, block_size * spec.bytes_per_token, budget.most)
        return config.num_blocks, "num_blocks as given"
    useful = config.max_num_seqs * blocks_of(longest, block_size)
    try:
        fitting = blocks_that_fit(spec.bytes_per_token, block_size, budget.num_bytes)
    except ValueError as error:
        raise ValueError(f"{error} ({budget.reason}); kv_cache_memory_bytes gives more") from error
    if useful <= fitting:
        return useful, (
            f"max_num_seqs {config.max_num_seqs} x {longest:,} tokens; memory would allow "
            f"{fitting:,} blocks: {budget.reason}"
        )
    return fitting, budget.reason


def _check_num_blocks(num_blocks: int, block_bytes: int, most: int) -> None:
    needed = (num_blocks + 1) * block_bytes
    if needed > most:
        raise ValueError(
            f"num_blocks {num_blocks:,} and the null block need {needed:,} bytes; beside the "
            f"weights {most:,} are free"
        )
