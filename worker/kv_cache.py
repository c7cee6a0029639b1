"""How much KV cache there is: blocks, tokens, bytes."""

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

    def describe(self) -> str:
        """The arithmetic behind the size, for people."""
        spec = self.spec
        return (
            f"2 (K, V) x {spec.num_layers} layers x {spec.num_kv_heads} KV heads x "
            f"{spec.head_dim} x {spec.dtype.itemsize} bytes = {spec.bytes_per_token:,} bytes a "
            f"token; {self.num_blocks:,} blocks x {self.block_size} tokens = "
            f"{self.num_blocks * self.block_size:,} tokens = {self.num_bytes:,} bytes "
            f"({self.num_bytes / 1e9:.2f} GB, {self.num_bytes / 2**30:.2f} GiB)"
        )


def blocks_that_fit(spec: KVCacheSpec, block_size: int, num_bytes: int) -> int:
    """Blocks in `num_bytes` beside the null block. Raises ValueError with both sizes if none."""
    block_bytes = block_size * spec.bytes_per_token
    if num_bytes < 2 * block_bytes:
        raise ValueError(
            f"{num_bytes} bytes of KV cache; the null block and one more of {block_bytes} bytes "
            f"need {2 * block_bytes}"
        )
    return num_bytes // block_bytes - 1


def allocate_kv_cache(
    backend: AttentionBackend, spec: KVCacheSpec, num_blocks: int, block_size: int
) -> KVCache:
    """`num_blocks` counts the null block too. Raises ValueError naming the limit not met."""
    backend.allocate(spec, num_blocks, block_size)
    return KVCache(spec, num_blocks, block_size)
