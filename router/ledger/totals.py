"""What tenants used, added up by day: what `noria usage` shows.

Rows of one day, tenant, model and price are added up as they close, so that a question is
answered without reading them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from decimal import Decimal
from enum import Enum, auto

from router.ledger.prices import Price
from router.ledger.row import LOST, UsageRow


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over rows; `lost` are those among the requests."""

    requests: int = 0
    lost: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    delivered_tokens: int = 0
    wasted_tokens: int = 0
    device_us: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __neg__(self) -> "Counts":
        return Counts(*(-a for a in astuple(self)))


COUNT_NAMES = tuple(each.name for each in fields(Counts))


def counts_of(row: UsageRow) -> Counts:
    """What a closed row adds to its day."""
    return Counts(
        requests=1,
        lost=int(row.outcome == LOST),
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        generated_tokens=row.generated_tokens,
        delivered_tokens=row.delivered_tokens,
        wasted_tokens=row.wasted_tokens,
        device_us=row.device_us,
    )


@dataclass(frozen=True, slots=True)
class Heading:
    """What rows that are added up have in common."""

    day: str
    tenant: str
    model: str
    price: Price | None

    def cost(self, counts: Counts) -> Decimal | None:
        """Exact; None where the model had no price."""
        if self.price is None:
            return None
        return self.price.cost(counts.prompt_tokens, counts.cached_tokens, counts.delivered_tokens)


def heading_of(row: UsageRow) -> Heading:
    return Heading(row.day, row.tenant, row.model, row.price)


Totals = Mapping[Heading, Counts]


class GroupBy(Enum):
    """What a line of the answer is about, beside its tenant and currency."""

    DAY = auto()
    MODEL = auto()


@dataclass(frozen=True, slots=True)
class UsageLine:
    """`group` is a day or a model. Cost and currency are absent where nothing had a price."""

    tenant: str
    group: str
    currency: str
    counts: Counts
    cost: Decimal | None


def usage_lines(totals: Totals, by: GroupBy) -> list[UsageLine]:
    """One line per tenant, group and currency, in this order; amounts are added exactly.

    What has a price and what has none are never added up: that would hide what is unpriced.
    """
    lines: dict[tuple[str, str, str], UsageLine] = {}
    for heading, counts in totals.items():
        group = heading.day if by is GroupBy.DAY else heading.model
        currency = "" if heading.price is None else heading.price.currency
        key = (heading.tenant, group, currency)
        before = lines.get(key, UsageLine(*key, Counts(), None))
        cost = _sum(before.cost, heading.cost(counts))
        lines[key] = UsageLine(*key, before.counts + counts, cost)
    return [lines[key] for key in sorted(lines)]


def add_up(rows: Iterable[UsageRow]) -> dict[Heading, Counts]:
    """The totals of closed rows."""
    totals: dict[Heading, Counts] = {}
    for row in rows:
        heading = heading_of(row)
        totals[heading] = totals.get(heading, Counts()) + counts_of(row)
    return totals


def _sum(a: Decimal | None, b: Decimal | None) -> Decimal | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
