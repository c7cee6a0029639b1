"""A row of the ledger: one admitted request, open while it goes on, closed once and for all.

Two rules decide between rows of one request. The first closing counts, repeated ones change
nothing. A closing by the router that had the request takes the place of `LOST`, which only
says that the router was not heard of: one that had merely paused loses nothing.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from router.ledger.prices import Price

SERVED = "SERVED"
# The router went away with the request; what it computed was counted as lost by its worker.
LOST = "LOST"
_DAY = "%Y-%m-%d"


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Times are microseconds since the epoch; `outcome` is empty while it is open.

    Prompt, cached and delivered tokens are those that are charged; a prompt is charged once a
    worker has computed something for it. `generated_tokens` were chosen by workers, of all
    attempts; `wasted_tokens` are those of them that nobody was sent. `unconfirmed_tokens` are
    part of the generated ones: received from workers that were lost before they told.
    """

    request_id: str
    router_id: str
    tenant: str
    key_id: str
    model: str
    started_us: int
    price: Price | None = None
    ended_us: int = 0
    outcome: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    delivered_tokens: int = 0
    unconfirmed_tokens: int = 0
    device_us: int = 0

    @property
    def wasted_tokens(self) -> int:
        return max(0, self.generated_tokens - self.delivered_tokens)

    @property
    def device_seconds(self) -> float:
        return self.device_us / 1e6

    @property
    def day(self) -> str:
        """The day, in UTC, on which it was admitted: to this one it is booked."""
        return day_of(self.started_us)

    @property
    def cost(self) -> Decimal | None:
        """Exact, in the price's currency; None where the model has no price."""
        if self.price is None:
            return None
        return self.price.cost(self.prompt_tokens, self.cached_tokens, self.delivered_tokens)

    def lost(self, now_us: int) -> "UsageRow":
        """This open row, closed by somebody else."""
        return replace(self, outcome=LOST, ended_us=now_us)

    def gives_way_to(self, closing: "UsageRow") -> bool:
        """Whether a closing takes the place of this closed row."""
        return self.outcome == LOST and closing.outcome != LOST


def day_of(unix_us: int) -> str:
    """The day in UTC, as 2026-01-31."""
    return datetime.fromtimestamp(unix_us / 1e6, UTC).strftime(_DAY)


def encode_row(row: UsageRow) -> str:
    """As JSON; what has its default value is left out."""
    told = {
        each.name: value
        for each in fields(row)
        if (value := getattr(row, each.name)) != each.default
    }
    if row.price is not None:
        told["price"] = encode_price(row.price)
    return json.dumps(told, separators=(",", ":"))


def decode_row(text: str) -> UsageRow:
    """Fields of a later version are passed over. Raises ValueError, TypeError, KeyError."""
    known = {each.name for each in fields(UsageRow)}
    told: dict[str, Any] = {k: v for k, v in json.loads(text).items() if k in known}
    if told.get("price") is not None:
        told["price"] = decode_price(told["price"])
    return UsageRow(**told)


def encode_price(price: Price) -> list[str]:
    return [str(value) for value in asdict(price).values()]


def decode_price(told: list[str]) -> Price:
    currency, *amounts = told
    return Price(currency, *map(Decimal, amounts))
