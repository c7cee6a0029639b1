"""Sequences in order of precedence: priority, then arrival."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from worker.sequence import Sequence


def _urgency(sequence: Sequence) -> tuple[int, int]:
    return (sequence.priority, -sequence.order)


class PrecedenceList:
    """A sorted list; iteration begins with the most urgent sequence.

    Kept with the most urgent last, so that taking it out moves nothing.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Most urgent first, as they stood when the iteration began."""
        return iter(self._sequences[::-1])

    @property
    def most_urgent(self) -> Sequence:
        """Raises IndexError if there is none."""
        return self._sequences[-1]

    @property
    def least_urgent(self) -> Sequence:
        """Raises IndexError if there is none."""
        return self._sequences[0]

    def least_first(self) -> Iterator[Sequence]:
        """Least urgent first, as they stood when the iteration began."""
        return iter(self._sequences[:])

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_urgency)

    def remove(self, sequence: Sequence) -> None:
        """Raises RuntimeError if it is not there."""
        at = bisect_left(self._sequences, _urgency(sequence), key=_urgency)
        if at == len(self._sequences) or self._sequences[at] is not sequence:
            raise RuntimeError(f"sequence {sequence.sequence_id} is not in its queue")
        del self._sequences[at]
