"""Rows on their way to the store: bounded, oldest first, nothing forgotten before it is written."""

from collections.abc import Sequence
from itertools import islice

from router.ledger.row import UsageRow


class RowBuffer:
    """At most `max_rows` rows. A closing takes the place of its opening that still waits.

    What does not fit: openings give way to closings, which say all that they do; a closing that
    finds closings alone is dropped and counted. Its row is closed as LOST once its router is
    gone, if it was opened at all.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._openings: dict[str, UsageRow] = {}
        self._closings: dict[str, UsageRow] = {}
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._openings) + len(self._closings)

    def open(self, row: UsageRow) -> None:
        """Where there is no room it is left out: its closing is still to come."""
        if len(self) < self._max_rows:
            self._openings[row.request_id] = row

    def close(self, row: UsageRow) -> None:
        self._openings.pop(row.request_id, None)
        if len(self) >= self._max_rows and self._openings:
            del self._openings[next(iter(self._openings))]
        if len(self) < self._max_rows:
            self._closings[row.request_id] = row
        else:
            self.dropped += 1

    def first(self, count: int) -> tuple[list[UsageRow], list[UsageRow]]:
        """The oldest openings and the oldest closings, at most so many each; they stay."""
        return _first(self._openings, count), _first(self._closings, count)

    def written(self, openings: Sequence[UsageRow], closings: Sequence[UsageRow]) -> None:
        """These are in the store; whatever came in their places meanwhile is not."""
        _remove(self._openings, openings)
        _remove(self._closings, closings)


def _first(rows: dict[str, UsageRow], count: int) -> list[UsageRow]:
    return list(islice(rows.values(), count))


def _remove(waiting: dict[str, UsageRow], rows: Sequence[UsageRow]) -> None:
    for row in rows:
        if waiting.get(row.request_id) is row:
            del waiting[row.request_id]
