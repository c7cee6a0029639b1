"""How the Triton kernels cut up their work: a fixed table, so that bits and times never vary.

Nothing is tuned while serving: the choice would stall a step, and change its rounding.
"""

from dataclasses import dataclass

HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256)
# Keys of one split; beyond so many splits they grow instead. Both depend on the row alone.
SPLIT = 256
MAX_SPLITS = 32
# Fewer rows than this do not fill a tensor core's tile.
MIN_ROWS = 16
# Positions that one program writes to the cache.
WRITTEN_ROWS = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` of queries (positions x the heads that share a KV head) against `keys` at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def power_of_two(count: int) -> int:
    """The least that is not below `count`."""
    return 1 << (count - 1).bit_length()


def decode_tile(group: int, head_dim: int, itemsize: int) -> Tile:
    """One position's `group` query heads; the keys stream past them.

    Of five stages the block table takes three, so that two tiles of keys are on their way.
    """
    rows = max(MIN_ROWS, power_of_two(group))
    row_bytes = power_of_two(head_dim) * itemsize
    return Tile(rows, min(64, max(16, 64 * 256 // row_bytes)), num_warps=4, num_stages=5)


def prefill_tile(group: int, head_dim: int, itemsize: int) -> Tile:
    """As many positions as fit: with 64 rows a group of four warps shares one wgmma."""
    wide = power_of_two(head_dim)
    rows = max(64 if itemsize > 2 else 128, power_of_two(group))
    if itemsize > 2:
        return Tile(rows, 32 if wide <= 128 else 16, num_warps=8, num_stages=2)
    return Tile(rows, 64 if wide <= 128 else 32, num_warps=8, num_stages=3 if wide <= 64 else 2)


def num_splits(seen: int) -> int:
    """Into how many splits a row's `seen` keys fall: the kernels compute the same."""
    return -(-seen // split_size(seen)) if seen else 0


def split_size(seen: int) -> int:
    return SPLIT * max(1, -(-seen // (SPLIT * MAX_SPLITS)))
