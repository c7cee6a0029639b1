"""What was used is told to whom it belongs, and to operators."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from noria.reasons import Reason, RequestError
from noria.v1 import chat_pb2
from router import wire_usage
from router.auth import Tenant
from router.ledger.prices import Price
from router.ledger.row import LOST, SERVED, UsageRow
from router.ledger.totals import GroupBy
from router.store.base import StoreUnavailableError
from router.store.memory_ledger import MemoryLedger
from router.usage import UsageQuestion, UsageReports

PRICE = Price("EUR", Decimal("0.15"), Decimal("0.075"), Decimal("0.60"))
SEARCH, ADMIN = Tenant("search"), Tenant("operators", admin=True)


def row(number, tenant, day, model="chat", price=PRICE, outcome=SERVED):
    began = datetime.fromisoformat(f"{day}T23:59:59+00:00").timestamp()
    tokens = {} if outcome == LOST else {"prompt_tokens": 1000, "delivered_tokens": 7}
    return UsageRow(
        f"req-{number}", "r", tenant, "k", model, int(began * 1e6), price,
        outcome=outcome, **tokens,
    )  # fmt: skip


@pytest.fixture
async def reports():
    ledger = MemoryLedger()
    await ledger.close(
        [
            row(1, "search", "2026-01-30"),
            row(2, "search", "2026-01-31"),
            row(3, "search", "2026-01-31", model="large", price=None),
            row(4, "mail", "2026-01-31"),
            row(5, "mail", "2026-01-31", outcome=LOST),
            row(6, "mail", "2025-12-31"),
        ]
    )
    return UsageReports(ledger, now=lambda: datetime(2026, 1, 31, 23, 59, tzinfo=UTC))


def asked(tenant="", since="", until="", by=GroupBy.DAY):
    return UsageQuestion(tenant, since, until, by)


async def told(reports, asker, *question, **named):
    report = await reports.report(asker, asked(*question, **named))
    return [(x.tenant, x.group, x.currency, x.counts.requests, x.cost) for x in report.lines]


COST = Decimal("0.0001542")


async def test_an_ordinary_key_sees_its_own_tenant_by_day(reports):
    lines = [
        ("search", "2026-01-30", "EUR", 1, COST),
        ("search", "2026-01-31", "", 1, None),
        ("search", "2026-01-31", "EUR", 1, COST),
    ]
    assert await told(reports, SEARCH) == lines
    assert await told(reports, SEARCH, "search") == lines


async def test_what_has_no_price_is_never_added_to_what_has_one(reports):
    lines = await told(reports, SEARCH, by=GroupBy.MODEL)
    assert lines == [("search", "chat", "EUR", 2, 2 * COST), ("search", "large", "", 1, None)]


async def test_an_operator_sees_all_or_the_one_asked_for(reports):
    everybody = await told(reports, ADMIN)
    assert {line[0] for line in everybody} == {"search", "mail"}
    assert await told(reports, ADMIN, "mail") == [("mail", "2026-01-31", "EUR", 2, COST)]
    assert await told(reports, ADMIN, "nobody") == []
    old = await told(reports, ADMIN, "mail", since="2025-12-31", until="2025-12-31")
    assert old == [("mail", "2025-12-31", "EUR", 1, COST)]


async def test_lost_requests_are_counted_and_cost_nothing(reports):
    report = await reports.report(ADMIN, asked("mail"))
    (line,) = report.lines
    assert (line.counts.requests, line.counts.lost) == (2, 1)
    assert (report.since_day, report.until_day) == ("2026-01-02", "2026-01-31")


@pytest.mark.parametrize("tenant", ["mail", "nobody", "*"])
async def test_another_tenants_usage_is_refused_alike_whether_there_is_any(reports, tenant):
    with pytest.raises(RequestError) as caught:
        await reports.report(SEARCH, asked(tenant))
    assert caught.value.reason is Reason.METHOD_FORBIDDEN
    assert tenant not in caught.value.message


@pytest.mark.parametrize(
    ("since", "until", "field"),
    [
        ("2026-02-01", "", "since_day"),
        ("2024-01-01", "", "since_day"),
        ("2000-01-01", "2999-12-31", "since_day"),
        ("yesterday", "", "since_day"),
        ("2026-1-1", "", "since_day"),
        ("20260101", "", "since_day"),
        ("2026-W01-1", "", "since_day"),
        ("", "2026-02-30", "until_day"),
        ("", "0001-01-01", "until_day"),
        ("", "2026-01-31T00", "until_day"),
        ("", "\x00" * 10, "until_day"),
    ],
)
async def test_days_that_are_none_or_too_many_are_refused_by_field(reports, since, until, field):
    with pytest.raises(RequestError) as caught:
        await reports.report(SEARCH, asked("", since, until))
    assert [name for name, _ in caught.value.fields] == [field]


async def test_a_store_that_is_away_is_no_usage_of_nothing():
    class Away(MemoryLedger):
        async def totals(self, days, tenant):
            raise StoreUnavailableError

    with pytest.raises(RequestError) as caught:
        await UsageReports(Away()).report(SEARCH, asked())
    assert caught.value.reason is Reason.STORE_UNAVAILABLE


async def test_on_the_wire_money_is_a_plain_decimal(reports):
    request = chat_pb2.GetUsageRequest(group_by=chat_pb2.USAGE_GROUP_MODEL)
    report = await reports.report(SEARCH, wire_usage.question(request))
    lines = wire_usage.report(report).lines
    assert [(line.group, line.currency, line.cost) for line in lines] == [
        ("chat", "EUR", "0.0003084"),
        ("large", "", ""),
    ]
