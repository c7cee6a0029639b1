"""Answers what was used, by whom and what it cost, from the ledger's daily totals."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from noria.reasons import Reason, RequestError, invalid_field
from noria.service.limits import MAX_USAGE_DAYS, MAX_USAGE_LINES
from router.auth import Tenant
from router.ledger.totals import GroupBy, UsageLine, usage_lines
from router.store.base import StoreUnavailableError
from router.store.ledger_store import LedgerStore

DEFAULT_DAYS = 30
_DAY = re.compile(r"2\d{3}-\d{2}-\d{2}", re.ASCII)


@dataclass(frozen=True, slots=True)
class UsageQuestion:
    """As on the wire: empty days are filled in, an empty tenant is all that the key may see."""

    tenant: str
    since_day: str
    until_day: str
    by: GroupBy


@dataclass(frozen=True, slots=True)
class UsageReport:
    """The days, both included, that the lines are about."""

    since_day: str
    until_day: str
    lines: Sequence[UsageLine]


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class UsageReports:
    """Reads the ledger. `now` gives the time, in UTC."""

    ledger: LedgerStore
    now: Callable[[], datetime] = _now

    async def report(self, asker: Tenant, question: UsageQuestion) -> UsageReport:
        """Raises INVALID_FIELD, METHOD_FORBIDDEN, STORE_UNAVAILABLE."""
        tenant = _visible(asker, question.tenant)
        days = self._days(question)
        try:
            totals = await self.ledger.totals(days, tenant)
        except StoreUnavailableError:
            problem = "the store of the usage ledger cannot be asked now"
            raise RequestError(Reason.STORE_UNAVAILABLE, problem) from None
        lines = usage_lines(totals, question.by)
        if len(lines) > MAX_USAGE_LINES:
            problem = f"{len(lines)} lines; at most {MAX_USAGE_LINES}: ask for fewer days"
            raise invalid_field("since_day", problem)
        return UsageReport(days[0], days[-1], lines)

    def _days(self, question: UsageQuestion) -> list[str]:
        """Each day asked for, oldest first."""
        until = _day("until_day", question.until_day) or self.now().date()
        since = _day("since_day", question.since_day) or until - timedelta(days=DEFAULT_DAYS - 1)
        count = (until - since).days + 1
        if not 0 < count <= MAX_USAGE_DAYS:
            problem = f"{count} days until {until}; from 1 to {MAX_USAGE_DAYS}"
            raise invalid_field("since_day", problem)
        return [(since + timedelta(days=number)).isoformat() for number in range(count)]


def _visible(asker: Tenant, tenant: str) -> str | None:
    """Whose usage is told of; None: everybody's."""
    if asker.admin:
        return tenant or None
    if tenant not in ("", asker.name):
        problem = "the API key may not read the usage of other tenants"
        raise RequestError(Reason.METHOD_FORBIDDEN, problem)
    return asker.name


def _day(field: str, text: str) -> date | None:
    if not text:
        return None
    try:
        # Python reads other forms too, and years in which there is no day 30 days before.
        if _DAY.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise invalid_field(field, "a day as 2026-01-31 is needed")
