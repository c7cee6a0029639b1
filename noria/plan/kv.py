"""The arithmetic of the KV cache: one source for the worker that takes it and for planning."""

from noria.plan.units import both_units

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_BLOCK_SIZE = 16
# The part of a computer's free memory that keys and values may take: what else runs there,
# activations, buffers of the network and the cache of files live in the other half.
HOST_KV_SHARE = 0.5


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """2 (K, V) x layers x KV heads x head size x bytes."""
    return 2 * num_layers * num_kv_heads * head_dim * itemsize


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens of one sequence."""
    return -(-num_tokens // block_size)


def blocks_that_fit(bytes_per_token: int, block_size: int, num_bytes: int) -> int:
    """Blocks in `num_bytes` beside the null block. Raises ValueError with both sizes if none."""
    block_bytes = block_size * bytes_per_token
    if num_bytes < 2 * block_bytes:
        raise ValueError(
            f"{num_bytes:,} bytes are left for the KV cache; the null block and one more of "
            f"{block_size} tokens x {bytes_per_token:,} bytes need {2 * block_bytes:,}"
        )
    return num_bytes // block_bytes - 1


def host_kv_bytes(available: int, weight_bytes: int, num_workers: int) -> int:
    """Bytes of KV cache for each of `num_workers` equal workers on one computer.

    `available` is what the computer had free before any of them loaded its weights. Raises
    ValueError with both sizes if the weights alone exceed it.
    """
    left = available - num_workers * weight_bytes
    if left < 0:
        raise ValueError(
            f"{available:,} bytes of memory are available; the weights need "
            f"{num_workers * weight_bytes:,} ({num_workers} x {weight_bytes:,}), "
            f"{-left:,} more"
        )
    return int(left * HOST_KV_SHARE) // num_workers


def cache_sentence(
    num_blocks: int, block_size: int, bytes_per_token: int, max_num_seqs: int, max_model_len: int
) -> str:
    """What a cache holds, for people who start a worker."""
    tokens = num_blocks * block_size
    at_full_length = num_blocks / blocks_of(max_model_len, block_size)
    full = min(at_full_length, max_num_seqs)
    return (
        f"KV cache: {tokens:,} tokens = {num_blocks:,} blocks of {block_size}, "
        f"{both_units(tokens * bytes_per_token)}; up to {min(max_num_seqs, num_blocks):,} chats at "
        f"once, {full:.3g} at the full length of {max_model_len:,}"
    )
