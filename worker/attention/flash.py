"""FlashAttention 2 and 3, and the one that torch brings, over one layout of the cache.

They are given their functions, so that a test may give others that hold them to the contract.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from worker.attention.base import AttentionMetadata, KVCacheSpec

Function = Callable[..., Any]
_MOST_SPLITS = 32


class _FlashBackend:
    """K and V lie as [layer, block, offset in the block, KV head, head_dim], K before V.

    Keys are never appended by the attention call itself: that would hide the write from
    whoever shares a block, and is declared as no write at all by FlashAttention 3.
    """

    name = ""
    row_exact = False
    captures_decodes = False
    block_multiple = 256
    default_block_size = 256

    def __init__(self, device: torch.device, function: Function) -> None:
        self._device, self._function = device, function

    def allocate(self, spec: KVCacheSpec, num_blocks: int, block_size: int) -> None:
        """Zeroed: kernels may multiply what lies behind a sequence's end by zero."""
        self._check_sizes(spec, num_blocks, block_size)
        shape = (2, spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        try:
            self._cache = torch.zeros(shape, dtype=spec.dtype, device=self._device)
        except RuntimeError as error:
            size = spec.bytes_per_token * block_size * num_blocks
            raise ValueError(f"num_blocks {num_blocks}: no memory for {size} bytes") from error
        self._slots = self._cache.flatten(2, 3)

    def plan(self, metadata: AttentionMetadata) -> None:
        """A slot below 0 is none: what would be written there goes to the null block."""
        starts = metadata.query_start_host
        counts = [end - start for start, end in pairwise(starts)]
        self._metadata = metadata
        self._most_queries, self._most_keys = max(counts), max(metadata.kv_lens_host)
        self._write_slots = metadata.slot_mapping.clamp(min=0)

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._slots[0, layer].index_copy_(0, self._write_slots, key)
        self._slots[1, layer].index_copy_(0, self._write_slots, value)

    def _check_sizes(self, spec: KVCacheSpec, num_blocks: int, block_size: int) -> None:
        """Raises ValueError naming the limit and both numbers."""
        multiple = self.block_multiple
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; at least 1 is needed")
        if block_size < 1 or block_size % multiple:
            raise ValueError(f"block_size is {block_size}; a multiple of {multiple} is needed")
        for reason in flash_limits(spec.head_dim, spec.dtype):
            raise ValueError(reason)


class FlashAttention2Backend(_FlashBackend):
    """`flash_attn_varlen_func` (Dao 2023) with a block table, for every kind of step.

    The number of splits is left to it: set, it is wrong for several queries a sequence. It
    follows from the longest sequence, so that bits depend on the batch.
    """

    name = "flash_attn_2"
    captures_decodes = True

    def plan(self, metadata: AttentionMetadata) -> None:
        super().plan(metadata)
        self._key_starts = _starts(metadata.kv_lens)

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None = None
    ) -> torch.Tensor:
        attended: torch.Tensor = self._function(
            *(query, self._cache[0, layer], self._cache[1, layer]),
            cu_seqlens_q=self._metadata.query_start,
            cu_seqlens_k=self._key_starts,
            max_seqlen_q=self._most_queries,
            max_seqlen_k=self._most_keys,
            softmax_scale=scale,
            causal=True,
            window_size=_before(window),
            block_table=self._metadata.block_table,
        )
        return attended


class FlashAttention3Backend(_FlashBackend):
    """`flash_attn_with_kvcache` of FlashAttention 3 (Shah et al. 2024), Hopper alone.

    Its varlen function knows no block table; this one takes packed queries of all kinds. Of
    decodes, each sequence is split by its own length, into so many parts at most; with a
    number of its own choosing, a captured graph would keep one for the longest context.
    """

    name = "flash_attn_3"
    captures_decodes = True
    block_multiple = 1
    default_block_size = 16

    def plan(self, metadata: AttentionMetadata) -> None:
        super().plan(metadata)
        # Partial results of every position would take too much room for chunks of prompts.
        self._num_splits = _MOST_SPLITS if self._most_queries == 1 else 0

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None = None
    ) -> torch.Tensor:
        attended: torch.Tensor = self._function(
            q=query,
            k_cache=self._cache[0, layer],
            v_cache=self._cache[1, layer],
            cache_seqlens=self._metadata.kv_lens,
            page_table=self._metadata.block_table,
            cu_seqlens_q=self._metadata.query_start,
            max_seqlen_q=self._most_queries,
            softmax_scale=scale,
            causal=True,
            window_size=_before(window),
            num_splits=self._num_splits,
        )
        return attended


class TorchVarlenBackend(_FlashBackend):
    """torch's own `varlen_attn`: FlashAttention 2's kernels without another package.

    One split always: with more it leaves rows unwritten (pytorch issue 194167). So a row's bits
    depend on its sequence alone, but few long sequences decode slowly.
    """

    name = "torch_varlen"
    captures_decodes = True

    def plan(self, metadata: AttentionMetadata) -> None:
        super().plan(metadata)
        self._key_starts = _starts(metadata.kv_lens)

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None = None
    ) -> torch.Tensor:
        left, _ = _before(window)
        attended: torch.Tensor = self._function(
            *(query, self._cache[0, layer], self._cache[1, layer]),
            *(self._metadata.query_start, self._key_starts),
            *(self._most_queries, self._most_keys),
            scale=scale,
            # Causal by the right side alone, and only as a tuple.
            window_size=(left, 0),
            enable_gqa=True,
            seqused_k=self._metadata.kv_lens,
            block_table=self._metadata.block_table,
            num_splits=1,
        )
        return attended


def flash_limits(head_dim: int, dtype: torch.dtype) -> list[str]:
    """What their kernels do not compute."""
    found = []
    if head_dim % 8 or head_dim > 256:
        found.append(f"head_dim is {head_dim}; a multiple of 8 up to 256 is needed")
    if dtype not in (torch.float16, torch.bfloat16):
        found.append(f"the cache's dtype is {dtype}; torch.float16 or torch.bfloat16 is needed")
    return found


def _before(window: int | None) -> tuple[int, int]:
    """How many keys left and right of its own a query sees; -1: all of them."""
    return (-1, -1) if window is None else (window - 1, 0)


def _starts(lens: torch.Tensor) -> torch.Tensor:
    """int32 [R + 1]: 0 and the running sums, on the same device."""
    starts = lens.new_zeros(len(lens) + 1)
    torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
    return starts
