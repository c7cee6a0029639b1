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
    """Positions [start, end) of one sequence; slots int64 of all that they see, in order.

    Slots end with the chunk's last position; a window leaves out what none of them sees.
    """

    start: int
    end: int
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class _View:
    """What one window shows to a step's sequences; `mask` is the window's causal mask."""

    buckets: list[_Bucket]
    chunks: list[_Chunk]
    mask: torch.Tensor
    window: int | None


class TorchBackend:
    """K and V lie as [layer, slot, KV head, head_dim] with slot = block * block_size + offset."""

    name = "torch"
    row_exact = False
    captures_decodes = False
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
        self._masks: dict[int | None, torch.Tensor] = {}

    def plan(self, metadata: AttentionMetadata) -> None:
        self._metadata, self._write_slots = metadata, metadata.slot_mapping
        self._table = metadata.block_table.long()
        self._views: dict[int | None, _View] = {}

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._keys[layer].index_copy_(0, self._write_slots, key)
        self._values[layer].index_copy_(0, self._write_slots, value)

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None = None
    ) -> torch.Tensor:
        attended = torch.empty(query.shape, dtype=query.dtype)
        view = self._view(window)
        for bucket in view.buckets:
            self._decode(layer, bucket, query, scale, attended)
        for chunk in view.chunks:
            self._prefill(layer, view, chunk, query, scale, attended)
        return attended

    def _view(self, window: int | None) -> _View:
        """Built for the first layer of a step that asks for it."""
        longest = max(self._metadata.kv_lens_host)
        if window is not None and window >= longest:
            window = None
        if window not in self._views:
            self._views[window] = self._new_view(window, longest)
        return self._views[window]

    def _new_view(self, window: int | None, longest: int) -> _View:
        num_decodes, lens = self._metadata.num_decodes, self._metadata.kv_lens_host
        seen = [min(n, window or n) for n in lens[:num_decodes]]
        buckets = [self._bucket(rows, seen) for rows in _buckets_by_length(seen)]
        several = range(num_decodes, self._metadata.num_sequences)
        chunks = [self._chunk(row, window) for row in several]
        gathered = [len(b.slots) for b in buckets] + [len(c.slots) for c in chunks]
        self._grow_scratch(max(gathered))
        return _View(buckets, chunks, self._mask(window, longest), window)

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
        view: _View,
        chunk: _Chunk,
        query: torch.Tensor,
        scale: float,
        attended: torch.Tensor,
    ) -> None:
        """Blocks of queries, each over the keys from the first to the last that it sees."""
        key, value = self._gather(layer, chunk.slots, 1)
        for start in range(chunk.start, chunk.end, _QUERY_BLOCK):
            end = min(start + _QUERY_BLOCK, chunk.end)
            last = len(chunk.slots) - (chunk.end - end)
            first = 0 if view.window is None else max(0, last - (end - start) - view.window + 1)
            result = F.scaled_dot_product_attention(
                query[start:end].transpose(0, 1).unsqueeze(0),
                key[:, :, first:last],
                value[:, :, first:last],
                attn_mask=view.mask[_QUERY_BLOCK - (end - start) :, first - last :],
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

    def _bucket(self, rows: list[int], seen: list[int]) -> _Bucket:
        """`rows` of decodes with the last `seen` positions of each."""
        index, counts = torch.tensor(rows), torch.tensor([seen[row] for row in rows])
        length = int(counts.max())
        slots = self._slots(index, self._metadata.kv_lens[index].long() - counts, length)
        written = torch.arange(length) < counts.unsqueeze(1)
        if written.all():
            return _Bucket(index, slots.reshape(-1), None)
        mask = torch.zeros(written.shape, dtype=self._spec.dtype)
        mask.masked_fill_(~written, float("-inf"))
        slots = torch.where(written, slots, slots[:, :1])
        return _Bucket(index, slots.reshape(-1), mask[:, None, None])

    def _chunk(self, row: int, window: int | None) -> _Chunk:
        start, end = self._metadata.query_start_host[row : row + 2]
        kv_len = self._metadata.kv_lens_host[row]
        first = 0 if window is None else max(0, kv_len - (end - start) - window + 1)
        slots = self._slots(torch.tensor([row]), torch.tensor([first]), kv_len - first)
        return _Chunk(start, end, slots[0])

    def _slots(self, rows: torch.Tensor, first: torch.Tensor, length: int) -> torch.Tensor:
        """[N, length] slots from position `first` [N] of each of `rows` [N] on.

        Whole blocks are spelled out and then shifted: a division per token would cost more.
        """
        size, offsets = self._block_size, first % self._block_size
        num_blocks = -(-(length + int(offsets.max())) // size)
        at = (first // size).unsqueeze(1) + torch.arange(num_blocks)
        blocks = self._table[rows].gather(1, at.clamp_(max=self._table.shape[1] - 1))
        slots = (blocks.unsqueeze(2) * size + torch.arange(size)).flatten(1)
        if not offsets.any():
            return slots[:, :length]
        return slots.gather(1, offsets.unsqueeze(1) + torch.arange(length))

    def _grow_scratch(self, num_tokens: int) -> None:
        size = num_tokens * self._spec.num_kv_heads * self._spec.head_dim
        if size > self._scratch.shape[1]:
            self._scratch = self._scratch.new_empty((2, size))

    def _mask(self, window: int | None, longest: int) -> torch.Tensor:
        """The window's mask, at least as wide as one block of queries can see."""
        width = longest if window is None else min(longest, window + _QUERY_BLOCK - 1)
        if window not in self._masks or self._masks[window].shape[1] < width:
            roomy = max(_MIN_MASK_WIDTH, 1 << (width - 1).bit_length())
            self._masks[window] = _bottom_right_mask(roomy, window, self._spec.dtype)
        return self._masks[window]


def _bottom_right_mask(width: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[_QUERY_BLOCK, width]: row i sees all but the last _QUERY_BLOCK - 1 - i keys.

    Of those, only the last `window` if there is one. Its bottom right corner of any size
    [n, m] is the mask of the last n of m positions.
    """
    own = width - _QUERY_BLOCK
    hidden = torch.ones((_QUERY_BLOCK, width), dtype=torch.bool).triu_(own + 1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril_(own - window)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


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
