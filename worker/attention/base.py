"""The one interface of all attention backends.

A backend owns the layout of keys and values. Per step the runner builds one
`AttentionMetadata`; every layer then writes its K/V at slots and attends through block
tables: prefill, chunked prefill and decode are the same call.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from noria.plan.kv import kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of the cache: K and V per layer, `num_kv_heads` heads of `head_dim` each."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Of K and V in all layers, as planning counts them."""
        return kv_bytes_per_token(
            self.num_layers, self.num_kv_heads, self.head_dim, self.dtype.itemsize
        )


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's batch of R sequences and T positions, packed without padding.

    Sequences that compute a single position come first; there are `num_decodes` of them.
    query_start   int32 [R + 1]  where each sequence's positions begin among the T
    kv_lens       int32 [R]      tokens in the cache after this step's writes
    block_table   int32 [R, W]   blocks in order; unused entries are block 0
    slot_mapping  int64 [T]      block * block_size + offset
    positions     int64 [T]
    The lists hold the same numbers as `query_start` and `kv_lens` for host-side decisions.
    """

    num_decodes: int
    query_start: torch.Tensor
    kv_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    query_start_host: list[int]
    kv_lens_host: list[int]

    @property
    def num_sequences(self) -> int:
        return len(self.kv_lens_host)


class AttentionBackend(Protocol):
    """Writes K/V into its own cache and attends over it.

    `row_exact`: a token's K/V and attention output have the same bits whether it is
    prefilled or decoded, in any batch.
    `captures_decodes`: a step of decodes alone, `plan` included, may be captured in a CUDA
    graph: nothing is read back from the device, and the host's lengths are upper bounds.
    """

    name: str
    row_exact: bool
    captures_decodes: bool
    default_block_size: int

    def allocate(self, spec: KVCacheSpec, num_blocks: int, block_size: int) -> None:
        """Take memory for the cache, before the first step. Raises ValueError naming the limit."""
        ...

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare one step: what all layers share is computed here, once."""
        ...

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value, [T, num_kv_heads, head_dim], at the planned slots."""
        ...

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """Causal attention of query [T, num_heads, head_dim] over the cache; the same shape.

        Scores are multiplied by `scale`. The position q sees the positions p <= q, and of
        those with a `window` (at least 1) only p > q - window: the last `window` of them,
        its own included. A model's layers may differ in both; few distinct windows occur.
        """
        ...


class FusedRotation(ABC):
    """A backend that rotates, writes and reads with one launch where others take several."""

    @abstractmethod
    def rotate_and_write(
        self,
        layer: int,
        heads: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """Rotary embedding of queries and keys; keys and values go to the planned slots.

        heads [T, num_heads + num_kv_heads, head_dim], the queries' first; value
        [T, num_kv_heads, head_dim]; cos and sin fp32 [T, 1, head_dim / 2]. Pairs are
        (i, i + head_dim / 2). Gives the queries, [T, num_heads, head_dim].
        """
