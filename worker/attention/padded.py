"""Attention with plain torch operations on any device, decided by the host's numbers alone.

Decodes read whole block tables and mask what lies beyond their lengths: more memory traffic
than a kernel needs, but no shape depends on what the device holds. For a GPU without
Triton, and what graphs are tested with where there is none.
"""

import torch
import torch.nn.functional as F  # noqa: N812

from worker.attention.base import AttentionMetadata, KVCacheSpec


class PaddedBackend:
    """K and V lie as [layer, block, offset in the block, KV head, head_dim]."""

    name = "torch_padded"
    row_exact = False
    captures_decodes = True
    default_block_size = 16

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, spec: KVCacheSpec, num_blocks: int, block_size: int) -> None:
        for limit, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{limit} is {value}; at least 1 is needed")
        shape = (2, spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        try:
            self._cache = torch.zeros(shape, dtype=spec.dtype, device=self._device)
        except RuntimeError as error:
            size = spec.bytes_per_token * block_size * num_blocks
            raise ValueError(f"num_blocks {num_blocks}: no memory for {size} bytes") from error
        self._slots = self._cache.flatten(2, 3)
        self._spec, self._block_size = spec, block_size

    def plan(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._table = metadata.block_table.long()
        self._decoding = self._places_of_decodes() if metadata.num_decodes else None

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._slots[0, layer].index_copy_(0, self._metadata.slot_mapping, key)
        self._slots[1, layer].index_copy_(0, self._metadata.slot_mapping, value)

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None = None
    ) -> torch.Tensor:
        metadata, attended = self._metadata, torch.empty_like(query)
        count = metadata.num_decodes
        if self._decoding is not None:
            attended[:count] = self._decode(layer, query[:count], scale, window)
        for row in range(count, metadata.num_sequences):
            start, end = metadata.query_start_host[row : row + 2]
            attended[start:end] = self._prefill(layer, row, query[start:end], scale, window)
        return attended

    def _places_of_decodes(self) -> tuple[int, torch.Tensor]:
        """How many blocks of each are read, and how far each place is behind its query [R, L].

        Below 0: not yet written.
        """
        metadata, count = self._metadata, self._metadata.num_decodes
        width = -(-max(metadata.kv_lens_host[:count]) // self._block_size)
        places = torch.arange(width * self._block_size, device=self._device)
        return width, (metadata.kv_lens[:count] - 1).unsqueeze(1) - places

    def _decode(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """The query heads that share a KV head take the place of query positions."""
        if self._decoding is None:
            raise RuntimeError("decodes were not planned")
        width, behind = self._decoding
        count, heads, head_dim = query.shape
        key, value = self._read(layer, self._table[:count, :width])
        visible = _visible(behind, window)
        # Whatever an earlier owner of the block has left there may be no number.
        hidden = ~visible[:, :, None, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
        result = F.scaled_dot_product_attention(
            query.view(count, self._spec.num_kv_heads, -1, head_dim),
            *(key.transpose(1, 2), value.transpose(1, 2)),
            attn_mask=visible[:, None, None],
            scale=scale,
        )
        return result.reshape(count, heads, head_dim)

    def _prefill(
        self, layer: int, row: int, query: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Of one sequence: query [n, num_heads, head_dim], its last n positions."""
        length = self._metadata.kv_lens_host[row]
        first = 0 if window is None else max(0, length - len(query) - window + 1)
        width = -(-length // self._block_size)
        key, value = self._read(layer, self._table[row : row + 1, :width])
        places = torch.arange(first, length, device=self._device)
        own = places[len(places) - len(query) :].unsqueeze(1)
        result = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            *(key[:, first:length].transpose(1, 2), value[:, first:length].transpose(1, 2)),
            attn_mask=_visible(own - places, window),
            scale=scale,
            enable_gqa=True,
        )
        return result[0].transpose(0, 1)

    def _read(self, layer: int, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the blocks of tables [N, W]: [N, W * block_size, KV heads, head_dim]."""
        both = self._cache[:, layer].index_select(1, tables.flatten())
        key, value = both.view(2, *tables.shape, *both.shape[2:]).flatten(2, 3)
        return key, value


def _visible(behind: torch.Tensor, window: int | None) -> torch.Tensor:
    """`behind`: how far a place is behind its query."""
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)
