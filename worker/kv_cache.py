"""The KV cache that was taken: blocks, tokens, bytes."""

from dataclasses import dataclass

from worker.attention.base import AttentionBackend, KVCacheSpec


@dataclass(frozen=True, slots=True)
class KVCache:
    """A cache of `num_blocks` blocks of `block_size` tokens, allocated by a backend."""

    spec: KVCacheSpec
    num_blocks: int
    block_size: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.spec.bytes_per_token


def allocate_kv_cache(
    backend: AttentionBackend, spec: KVCacheSpec, num_blocks: int, block_size: int
) -> KVCache:
    """`num_blocks` counts the null block too. Raises ValueError naming the limit not met."""
    backend.allocate(spec, num_blocks, block_size)
    return KVCache(spec, num_blocks, block_size)
