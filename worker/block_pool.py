"""Who holds which KV blocks. Knows ids and counts, no tensors.

Paged KV memory after Kwon et al. 2023, "Efficient Memory Management for Large
Language Model Serving with PagedAttention".
"""

from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """Ids 1 .. num_blocks, each free or held by one sequence; block 0 is never handed out.

    The null block stands in unused entries of block tables, so a cache needs room for
    num_blocks + 1 blocks.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks {num_blocks} and block_size {block_size} must be >= 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks, 0, -1))
        self._is_held = bytearray(num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks. Raises ValueError if there are fewer; takes none then."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._is_held[block] = 1
        return taken

    def release(self, block_ids: Iterable[int]) -> None:
        """Give blocks back. Raises ValueError for a block that is not held."""
        for block in block_ids:
            if not 0 < block <= self.num_blocks or not self._is_held[block]:
                raise ValueError(f"block {block} is not held")
            self._is_held[block] = 0
            self._free.append(block)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise RuntimeError unless the tables hold exactly the used blocks, each once."""
        held = [block for table in tables for block in table]
        if len(held) != len(set(held)):
            raise RuntimeError("a KV block has two owners")
        used = {block for block in range(1, self.num_blocks + 1) if self._is_held[block]}
        if set(held) != used:
            raise RuntimeError(f"{len(used)} KV blocks used, {len(held)} accounted for")
        if set(self._free) != set(range(1, self.num_blocks + 1)) - used:
            raise RuntimeError("the free list does not hold exactly the unused KV blocks")
