"""Who holds which KV blocks, and which of them hold a known prefix. Ids and counts, no tensors.

Paged KV memory after Kwon et al. 2023, "Efficient Memory Management for Large Language
Model Serving with PagedAttention"; reference counts, the LRU order of free blocks and the
map of cached prefixes live in one structure, as in vLLM V1.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Ids 1 .. num_blocks; each is free, or held by as many sequences as its count says.

    Only full blocks are shared, and they are never written again. A free block keeps its
    content and can be found by its digest until it is handed out for something new: the
    least recently freed first. Block 0, the null block, is never handed out; it stands in
    unused entries of block tables, so a cache needs room for num_blocks + 1 blocks.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks {num_blocks} and block_size {block_size} must be >= 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * (num_blocks + 1)
        # Next to be handed out first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # Full and held like published ones, but no longer found.
        self._withdrawn: set[int] = set()
        self._num_cached = 0
        self._num_holds = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those with a cached prefix included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be found."""
        return self._num_cached

    @property
    def num_doubled(self) -> int:
        """Holds beyond the first of each block: so many blocks fewer than tables say are used."""
        return self._num_holds - self.num_used

    def num_holders(self, block: int) -> int:
        """How many sequences hold it."""
        return self._holders[block]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks for new content.

        Raises ValueError if there are fewer; takes none then.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        self._num_holds += count
        return [self._take_oldest() for _ in range(count)]

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known beginning of a chain of digests. Holds nothing."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are free."""
        return sum(not self._holders[block] for block in block_ids)

    def share(self, block_ids: Sequence[int]) -> None:
        """Hold blocks that `find` gave, beside whoever holds them already."""
        self._num_holds += len(block_ids)
        for block in block_ids:
            if not self._holders[block]:
                del self._free[block]
                self._num_cached -= 1
            self._holders[block] += 1

    def publish(self, block: int, digest: bytes) -> None:
        """Let a full, held block be found by the digest of all it stands for.

        Another block with the same content keeps its place. Raises ValueError if not held.
        """
        self._check_held(block)
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def release(self, block_ids: Sequence[int]) -> None:
        """Give a sequence's blocks back. Raises ValueError for a block that is not held.

        Its last blocks come to be reused first: a beginning serves more prompts than an end.
        """
        for block in reversed(block_ids):
            self._check_held(block)
            self._holders[block] -= 1
            self._num_holds -= 1
            if not self._holders[block]:
                self._free[block] = None
                self._withdrawn.discard(block)
                if block in self._digest_of:
                    self._num_cached += 1
                else:
                    self._free.move_to_end(block, last=False)

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Let held blocks no longer be found: what they hold may be wrong."""
        for block in block_ids:
            self._check_held(block)
            digest = self._digest_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
                self._withdrawn.add(block)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise RuntimeError unless the tables account for every hold, and only they do."""
        holders = Counter(block for table in tables for block in table)
        counted = {block: count for block, count in enumerate(self._holders) if count}
        if holders != counted:
            raise RuntimeError(f"{len(counted)} KV blocks used, {len(holders)} accounted for")
        if self._num_holds != holders.total():
            raise RuntimeError("holds of KV blocks are miscounted")
        several = {block for block, count in holders.items() if count > 1}
        if not several <= self._digest_of.keys() | self._withdrawn:
            raise RuntimeError("a KV block that can still be written has two owners")
        if self._free.keys() != set(range(1, self.num_blocks + 1)) - holders.keys():
            raise RuntimeError("the free list does not hold exactly the unused KV blocks")
        if {block: digest for digest, block in self._block_of.items()} != self._digest_of:
            raise RuntimeError("cached prefixes and their blocks differ")
        if self._num_cached != sum(block in self._digest_of for block in self._free):
            raise RuntimeError("cached free blocks are miscounted")

    def _take_oldest(self) -> int:
        block, _ = self._free.popitem(last=False)
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            self._num_cached -= 1
        self._holders[block] = 1
        return block

    def _check_held(self, block: int) -> None:
        if not 0 < block <= self.num_blocks or not self._holders[block]:
            raise ValueError(f"block {block} is not held")
