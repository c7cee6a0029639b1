"""Opens a row when a request is admitted, and closes it when nothing more can come of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from router.ledger.prices import Prices
from router.ledger.row import SERVED, UsageRow
from router.ledger.writer import LedgerWriter
from router.record import RequestRecord


@dataclass(frozen=True, slots=True)
class UsageLedger:
    """One router's entries. `wall_clock` gives seconds since the epoch.

    A row is opened before the request can reach a worker. It is closed when the request has
    ended and its last worker has said what it computed, so that what was wasted after a cancel
    is in it. Refused before it was admitted, a request has no row.
    """

    router_id: str
    prices: Prices
    writer: LedgerWriter
    wall_clock: Callable[[], float] = time.time

    def open(self, record: RequestRecord) -> None:
        """The request is admitted."""
        row = UsageRow(
            request_id=record.request_id,
            router_id=self.router_id,
            tenant=record.tenant,
            key_id=record.key_id,
            model=record.model,
            started_us=record.accepted_unix_us,
            price=self.prices.get(record.model),
        )
        record.account.when_settled(lambda: self._close(row, record))
        self.writer.open(row)

    def _close(self, row: UsageRow, record: RequestRecord) -> None:
        account = record.account
        self.writer.close(
            replace(
                row,
                ended_us=int(self.wall_clock() * 1e6),
                outcome=SERVED if record.reason is None else record.reason.value,
                prompt_tokens=account.prompt_tokens,
                cached_tokens=account.cached_tokens,
                generated_tokens=account.generated_tokens,
                delivered_tokens=record.output_tokens,
                unconfirmed_tokens=account.unconfirmed_tokens,
                device_us=account.device_us,
            )
        )
