"""Attention by our own Triton kernels: nothing to install beside torch on a GPU."""

from dataclasses import dataclass

import torch
import triton

from worker.attention.base import AttentionMetadata, FusedRotation, KVCacheSpec
from worker.attention.triton_kernels import (
    attention_kernel,
    combine_kernel,
    rotate_and_write_kernel,
    write_kernel,
)
from worker.attention.triton_tiles import (
    HEAD_DIMS,
    MAX_SPLITS,
    SPLIT,
    WRITTEN_ROWS,
    Tile,
    decode_tile,
    num_splits,
    power_of_two,
    prefill_tile,
)

BLOCK_MULTIPLE = 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LOG2_E = 1.4426950408889634
INTERPRETED = not isinstance(attention_kernel, triton.JITFunction)


@dataclass(frozen=True, slots=True)
class _Launch:
    """What attention of one kind of rows needs besides the tensors."""

    tile: Tile
    grid: tuple[int, int, int]
    first: int
    end: int
    decode: bool


class TritonBackend(FusedRotation):
    """K and V lie as [layer, block, KV head, offset in the block, head_dim].

    A decoding row's bits are its own: its keys are split by its own length, whatever else is
    in the batch. A prefilled row's are not the same (its tile adds up in another order), and
    neither are a GPU's matrix products: `row_exact` is false.

    A step of decodes alone may be captured in a CUDA graph: `plan` reads nothing from the
    device, and of the host's lengths only upper bounds.
    """

    name = "triton"
    row_exact = False
    default_block_size = BLOCK_MULTIPLE
    captures_decodes = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, spec: KVCacheSpec, num_blocks: int, block_size: int) -> None:
        check_sizes(spec, num_blocks, block_size)
        shape = (2, spec.num_layers, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        try:
            self._cache = torch.zeros(shape, dtype=spec.dtype, device=self._device)
        except RuntimeError as error:
            size = spec.bytes_per_token * block_size * num_blocks
            raise ValueError(f"num_blocks {num_blocks}: no memory for {size} bytes") from error
        self._spec, self._block_size = spec, block_size
        self._width = power_of_two(spec.head_dim)

    def plan(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        decodes = metadata.kv_lens_host[: metadata.num_decodes]
        self._longest = max(decodes, default=0)
        self._partial: torch.Tensor | None = None

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        keys, values = self._cache[0, layer], self._cache[1, layer]
        tiles = -(-key.shape[0] // WRITTEN_ROWS)
        write_kernel[tiles, self._spec.num_kv_heads](
            *(key, value, keys, values, self._metadata.slot_mapping, key.shape[0]),
            *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
            *keys.stride()[:3],
            BLOCK=self._block_size,
            HEAD_DIM=self._spec.head_dim,
            WIDTH=self._width,
            ROWS=WRITTEN_ROWS,
            num_warps=4,
        )

    def rotate_and_write(
        self,
        layer: int,
        heads: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        spec = self._spec
        num_heads = heads.shape[1] - spec.num_kv_heads
        group, half = num_heads // spec.num_kv_heads, spec.head_dim // 2
        rotated = heads.new_empty((heads.shape[0], num_heads, spec.head_dim))
        keys, values = self._cache[0, layer], self._cache[1, layer]
        rotate_and_write_kernel[heads.shape[0], spec.num_kv_heads](
            *(heads, value, rotated, keys, values, self._metadata.slot_mapping, cos, sin),
            *(num_heads, heads.stride(0), heads.stride(1), value.stride(0), value.stride(1)),
            *(rotated.stride(0), rotated.stride(1), cos.stride(0), *keys.stride()[:3]),
            GROUP=group,
            MEMBERS=power_of_two(group + 1),
            BLOCK=self._block_size,
            HEAD_DIM=spec.head_dim,
            HALF=half,
            HALF_WIDTH=power_of_two(half),
            WIDTH=self._width,
            num_warps=1,
        )
        return rotated

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None = None
    ) -> torch.Tensor:
        attended = torch.empty_like(query)
        metadata, group = self._metadata, query.shape[1] // self._spec.num_kv_heads
        if metadata.num_decodes:
            self._decode(layer, query, scale, window or 0, attended, group)
        if metadata.num_decodes < metadata.num_sequences:
            launch = self._prefills(query.shape[0], group)
            self._attend(launch, layer, query, scale, window or 0, attended, None)
        return attended

    def _decode(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int,
        attended: torch.Tensor,
        group: int,
    ) -> None:
        """A row of one split gets the same bits with and without combining."""
        spec, rows = self._spec, self._metadata.num_decodes
        longest = min(self._longest, window) if window else self._longest
        splits = max(1, most_splits(longest))
        tile = decode_tile(group, spec.head_dim, spec.dtype.itemsize)
        launch = _Launch(tile, (rows, spec.num_kv_heads, splits), 0, rows, decode=True)
        if splits == 1:
            self._attend(launch, layer, query, scale, window, attended, None)
            return
        partial, sizes = self._workspace(rows, query.shape[1])
        self._attend(launch, layer, query, scale, window, partial, sizes)
        combine_kernel[rows, query.shape[1]](
            *(partial, sizes, attended, self._metadata.kv_lens, window, *partial.stride()[:3]),
            *(*sizes.stride()[:2], *attended.stride()[:2]),
            HEAD_DIM=spec.head_dim,
            WIDTH=self._width,
            WINDOWED=window > 0,
            SPLIT=SPLIT,
            MAX_SPLITS=MAX_SPLITS,
            num_warps=4,
        )

    def _workspace(self, rows: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial results and their sizes, for all layers of the step: it is theirs in turn.

        Taken anew in each step, so that a captured one has memory that no other frees. With
        room for all splits that there may be, its strides are the same in every step.
        """
        width, count = self._spec.head_dim, MAX_SPLITS * rows * heads
        if self._partial is None or len(self._partial) != count * (width + 1):
            self._partial = torch.empty(
                count * (width + 1), dtype=torch.float32, device=self._device
            )
        partial = self._partial[: count * width].view(rows, MAX_SPLITS, heads, width)
        sizes = self._partial[count * width :].view(rows, MAX_SPLITS, heads)
        return partial.transpose(0, 1), sizes.transpose(0, 1)

    def _prefills(self, num_positions: int, group: int) -> _Launch:
        """Tiles are counted from above: which exist, the device finds out."""
        spec, metadata = self._spec, self._metadata
        tile = prefill_tile(group, spec.head_dim, spec.dtype.itemsize)
        first, end = metadata.num_decodes, metadata.num_sequences
        tiles = (num_positions - first) // (tile.rows // group) + end - first
        return _Launch(tile, (tiles, spec.num_kv_heads, 1), first, end, decode=False)

    def _attend(
        self,
        launch: _Launch,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int,
        out: torch.Tensor,
        sizes: torch.Tensor | None,
    ) -> None:
        """`sizes` is given for partial results: out [splits, rows, heads, head_dim] then."""
        spec, metadata = self._spec, self._metadata
        keys, values = self._cache[0, layer], self._cache[1, layer]
        partial = sizes is not None
        sizes = out if sizes is None else sizes
        attention_kernel[launch.grid](
            *(query, keys, values, out, sizes),
            *(metadata.query_start, metadata.kv_lens, metadata.block_table),
            *(launch.first, launch.end, window, scale * _LOG2_E),
            *(query.stride(0), query.stride(1), *keys.stride()[:3]),
            *(out.stride(0) if partial else 0, out.stride(-3), out.stride(-2)),
            *(sizes.stride(0), sizes.stride(1), metadata.block_table.stride(0)),
            GROUP=query.shape[1] // spec.num_kv_heads,
            BLOCK=self._block_size,
            HEAD_DIM=spec.head_dim,
            WIDTH=self._width,
            ROWS=launch.tile.rows,
            KEYS=launch.tile.keys,
            DECODE=launch.decode,
            PARTIAL=partial,
            WINDOWED=window > 0,
            UPCAST=INTERPRETED,
            SPLIT=SPLIT,
            MAX_SPLITS=MAX_SPLITS,
            num_warps=launch.tile.num_warps,
            num_stages=launch.tile.num_stages,
        )


def most_splits(longest: int) -> int:
    """Of any row of at most `longest` keys. Lengths just above a larger split have fewer."""
    return max(num_splits(longest), min(MAX_SPLITS, -(-longest // SPLIT)))


def limits(head_dim: int, dtype: torch.dtype) -> list[str]:
    """What the kernels do not compute."""
    found = []
    if head_dim not in HEAD_DIMS:
        found.append(f"head_dim is {head_dim}; one of {HEAD_DIMS} is needed")
    if dtype not in DTYPES:
        found.append(f"the cache's dtype is {dtype}; one of {DTYPES} is needed")
    return found


def check_sizes(spec: KVCacheSpec, num_blocks: int, block_size: int) -> None:
    """Raises ValueError naming the limit and both numbers."""
    if num_blocks < 1:
        raise ValueError(f"num_blocks is {num_blocks}; at least 1 is needed")
    if block_size < BLOCK_MULTIPLE or block_size % BLOCK_MULTIPLE:
        raise ValueError(f"block_size is {block_size}; a multiple of {BLOCK_MULTIPLE} is needed")
    for reason in limits(spec.head_dim, spec.dtype):
        raise ValueError(reason)
