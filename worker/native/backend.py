"""Attention and the KV cache of the native kernels."""

import torch

from noria.models.kernels import GROUP, HEAD_DIM_MULTIPLE, MAX_HEAD_DIM
from worker.attention.base import AttentionMetadata, KVCacheSpec
from worker.native.binding import BatchStruct, CacheStruct, ModelStruct, address
from worker.native.kernels import Kernels


class NativeBackend:
    """K and V in bf16, laid out for the kernels; see source/cache.h.

    Sums are formed per row in an order that nothing else decides: the same bits whether a
    token is prefilled or decoded, in any batch.
    """

    name = "cpu_native"
    row_exact = True
    captures_decodes = False
    default_block_size = GROUP

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def allocate(self, spec: KVCacheSpec, num_blocks: int, block_size: int) -> None:
        _check_sizes(spec, num_blocks, block_size)
        size = num_blocks * block_size * spec.num_layers * spec.num_kv_heads * 2 * spec.head_dim
        try:
            self._memory = torch.empty(size, dtype=torch.bfloat16)
        except RuntimeError as error:
            raise ValueError(f"num_blocks {num_blocks}: no memory for {2 * size} bytes") from error
        self._cache = CacheStruct(
            *(address(self._memory), num_blocks * block_size // GROUP, block_size // GROUP),
            *(spec.num_layers, spec.num_kv_heads, spec.head_dim),
        )

    def plan(self, metadata: AttentionMetadata) -> None:
        # Kept as long as the batch holds their addresses.
        self._metadata = metadata
        self._batch = BatchStruct(
            slots=address(metadata.slot_mapping),
            query_start=address(metadata.query_start),
            kv_lens=address(metadata.kv_lens),
            block_table=address(metadata.block_table),
            positions=len(metadata.positions),
            sequences=metadata.num_sequences,
            width=metadata.block_table.shape[1],
        )

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        stored = (tensor.to(torch.bfloat16).contiguous() for tensor in (key, value))
        self.kernels.write(self._cache, self._batch, layer, *stored)

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None = None
    ) -> torch.Tensor:
        converted = query.to(self.kernels.activations).contiguous()
        attended = torch.empty_like(converted)
        self.kernels.attend(
            self._cache, self._batch, layer, window or 0, scale, converted, attended
        )
        return attended.to(query.dtype)

    def step(
        self,
        model: ModelStruct,
        token_ids: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        """The planned step of a whole model.

        token_ids int64 [T]; cos and sin fp32 [T, head_dim / 2]; hidden [T, hidden_size] is
        filled. Raises KernelError, before anything is computed, for what lies outside.
        """
        batch = self._batch
        batch.token_ids, batch.cos, batch.sin = address(token_ids), address(cos), address(sin)
        self.kernels.step(model, self._cache, batch, hidden)


def _check_sizes(spec: KVCacheSpec, num_blocks: int, block_size: int) -> None:
    """Raises ValueError naming the limit."""
    if num_blocks < 1:
        raise ValueError(f"num_blocks is {num_blocks}; at least 1 is needed")
    if block_size < GROUP or block_size % GROUP:
        raise ValueError(f"block_size is {block_size}; a multiple of {GROUP} is needed")
    if spec.head_dim % HEAD_DIM_MULTIPLE or spec.head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim is {spec.head_dim}; a multiple of {HEAD_DIM_MULTIPLE} up to "
            f"{MAX_HEAD_DIM} is needed"
        )
    if spec.dtype is not torch.bfloat16:
        raise ValueError(f"the cache's dtype is {spec.dtype}; torch.bfloat16 is needed")
