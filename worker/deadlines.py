"""Which sequences are late, without looking at all of them."""

import heapq
from collections.abc import Iterator

_FEW = 64


class Deadlines:
    """Ids by deadline (seconds, on the caller's clock).

    Discarded ids leave the heap when they are due or outnumber the others: a discard costs
    constant time on average, and the heap never holds many more than are awaited.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._awaited: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._awaited)

    def add(self, deadline: float, sequence_id: int) -> None:
        self._awaited[sequence_id] = deadline
        heapq.heappush(self._heap, (deadline, sequence_id))

    def discard(self, sequence_id: int) -> None:
        """Forget an id; one that is not awaited is ignored."""
        self._awaited.pop(sequence_id, None)
        if len(self._heap) > 2 * len(self._awaited) + _FEW:
            self._heap = [(deadline, awaited) for awaited, deadline in self._awaited.items()]
            heapq.heapify(self._heap)

    def take_due(self, now: float) -> Iterator[int]:
        """The ids whose deadline has come, earliest first; each is told once."""
        while self._heap and self._heap[0][0] <= now:
            sequence_id = heapq.heappop(self._heap)[1]
            if self._awaited.pop(sequence_id, None) is not None:
                yield sequence_id
