"""Sequences' block tables: taken from the pool, shared by prefix, published, given back."""

from collections.abc import Iterator

from worker.block_pool import BlockPool
from worker.prefix import extend_digests
from worker.sequence import Sequence


class BlockTables:
    """Changes `block_ids` and `num_computed_tokens` of sequences together with the pool.

    Without `caches_prefixes` nothing is published, and so nothing is ever found. Blocks that
    a step in flight writes to stay held until it has landed, whoever is gone by then.
    """

    def __init__(self, pool: BlockPool, *, caches_prefixes: bool) -> None:
        self.pool = pool
        self.caches_prefixes = caches_prefixes
        self._landed_step = 0
        # Block tables of those that are gone, by the last step that writes to them.
        self._left: dict[int, list[list[int]]] = {}

    def find_cached(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's first tokens already; none whose logits it needs."""
        if not self.caches_prefixes:
            return []
        full = sequence.num_reusable_tokens // self.pool.block_size
        return self.pool.find(extend_digests(sequence, full, self.pool.block_size))

    def num_to_take(self, sequence: Sequence, cached: list[int]) -> int:
        """Free blocks that all its known tokens cost, the cached ones that are free included."""
        own = self.pool.blocks_for(sequence.num_tokens) - len(cached)
        return own + self.pool.num_unheld(cached)

    def begin(self, sequence: Sequence, cached: list[int]) -> None:
        """Hold the cached blocks: their tokens need not be computed."""
        self.pool.share(cached)
        sequence.block_ids = cached
        sequence.num_computed_tokens = len(cached) * self.pool.block_size

    def num_missing(self, sequence: Sequence, count: int) -> int:
        """Blocks to take before `count` more tokens are computed."""
        room = len(sequence.block_ids) * self.pool.block_size
        beyond = sequence.num_computed_tokens + count - room
        return self.pool.blocks_for(beyond) if beyond > 0 else 0

    def extend(self, sequence: Sequence, missing: int) -> None:
        """Take blocks for new content. Raises ValueError if fewer are free."""
        sequence.block_ids.extend(self.pool.allocate(missing))

    def publish(self, sequence: Sequence, first_position: int, end: int) -> None:
        """Let the blocks be found by later prompts that these positions have filled."""
        size = self.pool.block_size
        first, end = first_position // size, end // size
        if first == end or not self.caches_prefixes:
            return
        digests = extend_digests(sequence, end, size)
        for index in range(first, end):
            self.pool.publish(sequence.block_ids[index], digests[index])

    def release(self, sequence: Sequence) -> None:
        """Give all back; the sequence's tokens are computed anew if it goes on."""
        if sequence.last_step > self._landed_step:
            self._left.setdefault(sequence.last_step, []).append(sequence.block_ids)
        else:
            self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = 0

    def land(self, step: int) -> None:
        """Nothing is written any more by steps up to this one."""
        self._landed_step = step
        for block_ids in self._left.pop(step, ()):
            self.pool.release(block_ids)

    def left(self) -> Iterator[list[int]]:
        """Block tables of those that are gone, and written to as yet."""
        for tables in self._left.values():
            yield from tables

    def num_shared(self, sibling: Sequence) -> int:
        """Tokens in the full blocks of the prompt that a further choice will find."""
        if not self.caches_prefixes:
            return 0
        size = self.pool.block_size
        return (len(sibling.prompt_token_ids) - 1) // size * size
