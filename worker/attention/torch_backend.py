"""Attention with plain torch operations: runs everywhere, and is the oracle for the others."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from worker.attention.base import AttentionMetadata, KVCacheSpec

# Rows of a bucket may be padded to its longest by a quarter of their own tokens, or freely
# where the whole bucket is so small that one more call would cost more than the padding.
_FREE_BUCKET_TOKENS = 512
# Gathered K and V of one bucket stay near the last-level cache's size.
_MAX_BUCKET_TOKENS = 8192
_QUERY_BLOCK = 256
_MIN_MASK_WIDTH = 1024


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Sequences of one position each, computed in one call.

    rows int64 [N] among the step's positions; slots int64 [N * L], padded with a slot of the
    same sequence, so that no unwritten slot is ever read; mask [N, 1, 1, L], None if no padding.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Positions [start, end) of one sequence; slots int64 [kv_len] of all it sees."""

    start: int
    end: int
    slots: torch.Tensor


class TorchBackend:
    """K and V lie as [layer, slot, KV head, head_dim] with slot = block * block_size + offset."""

    name = "torch"
    row_exact = False
    default_block_size = 16

    def allocate(self, spec: KVCacheSpec, num_blocks: int, block_size: int) -> None:
        for limit, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{limit} is {value}; at least 1 is needed")
        shape = (spec.num_layers, num_blocks * block_size, spec.num_kv_heads, spec.head_dim)
        try:
            self._keys = torch.empty(shape, dtype=spec.dtype)
            self._values = torch.empty(shape, dtype=spec.dtype)
        except RuntimeError as error:
            size = spec.bytes_per_token * block_size * num_blocks
            raise ValueError(f"num_blocks {num_blocks}: no memory for {size} bytes") from error
        self._spec, self._block_size = spec, block_size
        self._scratch = self._keys.new_empty((2, 0))
        self._causal = _bottom_right_mask(_MIN_MASK_WIDTH, spec.dtype)

    def plan(self, metadata: AttentionMetadata) -> None:
        num_decodes, lens = metadata.num_decodes, metadata.kv_lens_host
        table, starts = metadata.block_table.long(), metadata.query_start_host
        self._write_slots = metadata.slot_mapping
        self._buckets = [
            self._bucket(table[rows], rows, [lens[row] for row in rows])
            for rows in _buckets_by_length(lens[:num_decodes])
        ]
        self._chunks = [
            _Chunk(starts[row], starts[row + 1], self._slots(table[row : row + 1], lens[row])[0])
            for row in range(num_decodes, metadata.num_sequences)
        ]
        gathered = [b.slots.numel() for b in self._buckets]
        gathered += [c.slots.numel() for c in self._chunks]
        self._grow(max(gathered), max(lens))

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._keys[layer].index_copy_(0, self._write_slots, key)
        self._values[layer].index_copy_(0, self._write_slots, value)

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        attended = torch.empty(query.shape, dtype=query.dtype)
        for bucket in self._buckets:
            self._decode(layer, bucket, query, scale, attended)
        for chunk in self._chunks:
            self._prefill(layer, chunk, query, scale, attended)
        return attended

    def _decode(
        self,
        layer: int,
        bucket: _Bucket,
        query: torch.Tensor,
        scale: float,
        attended: torch.Tensor,
    ) -> None:
        """The query heads that share a KV head take the place of query positions."""
        count, kv_heads, head_dim = len(bucket.rows), self._spec.num_kv_heads, self._spec.head_dim
        key, value = self._gather(layer, bucket.slots, count)
        grouped = query.index_select(0, bucket.rows).view(count, kv_heads, -1, head_dim)
        result = F.scaled_dot_product_attention(
            grouped, key, value, attn_mask=bucket.mask, scale=scale
        )
        attended.index_copy_(0, bucket.rows, result.reshape(count, -1, head_dim))

    def _prefill(
        self,
        layer: int,
        chunk: _Chunk,
        query: torch.Tensor,
        scale: float,
        attended: torch.Tensor,
    ) -> None:
        """Blocks of queries, each over the keys its last position sees."""
        key, value = self._gather(layer, chunk.slots, 1)
        for start in range(chunk.start, chunk.end, _QUERY_BLOCK):
            end = min(start + _QUERY_BLOCK, chunk.end)
            seen = len(chunk.slots) - (chunk.end - end)
            result = F.scaled_dot_product_attention(
                query[start:end].transpose(0, 1).unsqueeze(0),
                key[:, :, :seen],
                value[:, :, :seen],
                attn_mask=self._causal[_QUERY_BLOCK - (end - start) :, -seen:],
                scale=scale,
                enable_gqa=True,
            )
            attended[start:end] = result[0].transpose(0, 1)

    def _gather(
        self, layer: int, slots: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `count` equally long rows as [count, KV heads, L, head_dim].

        The scratch memory is reused: fresh pages would cost more than the copy.
        """
        row = self._keys.shape[2:]
        length, views = len(slots), []
        for cache, scratch in zip((self._keys, self._values), self._scratch, strict=True):
            gathered = scratch[: length * row.numel()].view(length, *row)
            torch.index_select(cache[layer], 0, slots, out=gathered)
            views.append(gathered.view(count, -1, *row).transpose(1, 2))
        return views[0], views[1]

    def _bucket(self, table: torch.Tensor, rows: list[int], lens: list[int]) -> _Bucket:
        length = max(lens)
        slots = self._slots(table, length)
        if min(lens) == length:
            return _Bucket(torch.tensor(rows), slots.reshape(-1), None)
        written = torch.arange(length) < torch.tensor(lens).unsqueeze(1)
        mask = torch.zeros(written.shape, dtype=self._spec.dtype)
        mask.masked_fill_(~written, float("-inf"))
        slots = torch.where(written, slots, slots[:, :1])
        return _Bucket(torch.tensor(rows), slots.reshape(-1), mask[:, None, None])

    def _slots(self, table: torch.Tensor, length: int) -> torch.Tensor:
        """Slots of the first `length` positions of each sequence of `table` [N, W]: [N, length]."""
        num_blocks = -(-length // self._block_size)
        first = table[:, :num_blocks, None] * self._block_size
        return (first + torch.arange(self._block_size)).flatten(1)[:, :length]

    def _grow(self, num_tokens: int, kv_len: int) -> None:
        size = num_tokens * self._spec.num_kv_heads * self._spec.head_dim
        if size > self._scratch.shape[1]:
            self._scratch = self._scratch.new_empty((2, size))
        if kv_len > self._causal.shape[1]:
            width = 1 << (kv_len - 1).bit_length()
            self._causal = _bottom_right_mask(width, self._spec.dtype)


def _bottom_right_mask(width: int, dtype: torch.dtype) -> torch.Tensor:
    """[_QUERY_BLOCK, width]: row i sees all but the last _QUERY_BLOCK - 1 - i keys.

    Its bottom right corner of any size [n, m] is the causal mask of the last n of m positions.
    """
    everything = torch.full((_QUERY_BLOCK, width), float("-inf"), dtype=dtype)
    return everything.triu_(diagonal=width - _QUERY_BLOCK + 1)


def _buckets_by_length(lens: list[int]) -> list[list[int]]:
    """Rows grouped so that padding each group to its longest wastes a bounded share."""
    buckets: list[list[int]] = []
    longest = used = 0
    for row in sorted(range(len(lens)), key=lens.__getitem__, reverse=True):
        padded = longest * (len(buckets[-1]) + 1) if buckets else 0
        fits = padded <= _FREE_BUCKET_TOKENS or (
            padded <= _MAX_BUCKET_TOKENS and padded <= 1.25 * (used + lens[row])
        )
        if not buckets or not fits:
            buckets.append([])
            longest, used = lens[row], 0
        buckets[-1].append(row)
        used += lens[row]
    return buckets
