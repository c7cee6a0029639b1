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

    def openings(self, count: int) -> list[UsageRow]:
        """The oldest ones, at most so many; they stay."""
        return list(islice(self._openings.values(), count))

    def closings(self, count: int) -> list[UsageRow]:
        """The oldest ones, at most so many; they stay."""
        return list(islice(self._closings.values(), count))

    def written(self, rows: Sequence[UsageRow]) -> None:
        """These are in the store; whatever came in their places meanwhile is not."""
        for row in rows:
            for waiting in (self._openings, self._closings):
                if waiting.get(row.request_id) is row:
                    del waiting[row.request_id]
