"""Which sequences are late, without looking at all of them."""

import heapq
from collections.abc import Iterator


class Deadlines:
    """Ids by deadline (seconds, on the caller's clock). Those that ended may stay until due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def add(self, deadline: float, sequence_id: int) -> None:
        heapq.heappush(self._heap, (deadline, sequence_id))

    def take_due(self, now: float) -> Iterator[int]:
        """The ids whose deadline has come, earliest first; each is told once."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]
