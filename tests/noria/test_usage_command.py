"""`noria usage`: a table that a stranger can read, and CSV without a rounded digit."""

import csv
import io
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner

from noria.cli.main import main
from noria.cli.usage import usage_csv, usage_table
from noria.reasons import Reason, RequestError
from noria.v1 import chat_pb2
from tests.noria.fake_chat import FakeChat, refuse, serving

LINE = {
    "requests": 1200, "lost_requests": 1, "prompt_tokens": 1_234_567, "cached_tokens": 200_000,
    "generated_tokens": 90_500, "delivered_tokens": 90_000, "wasted_tokens": 500,
    "device_us": 61_234_567,
}  # fmt: skip


def report(*lines):
    made = [
        chat_pb2.UsageLine(tenant=tenant, group=group, currency=currency, cost=cost, **LINE)
        for tenant, group, currency, cost in lines
    ]
    return chat_pb2.GetUsageResponse(since_day="2026-01-02", until_day="2026-01-31", lines=made)


PRICED = ("search", "2026-01-30", "EUR", "12.3456789")
TWO = report(PRICED, ("search", "2026-01-31", "", ""))


def test_the_table_has_a_line_for_each_and_a_sum_for_each_currency():
    told = usage_table(report(PRICED, ("mail", "2026-01-31", "EUR", "0.00001"), *NO_PRICE), "day")
    lines = [line.split() for line in told.splitlines()]
    assert told.startswith("2026-01-02 to 2026-01-31 (UTC)\n\nTENANT")
    assert lines[3] == [
        "search", "2026-01-30", "1,200", "1", "1,234,567", "200,000", "90,000", "500",
        "61.2s", "12.3457", "EUR",
    ]  # fmt: skip
    assert lines[6][:3] == ["total", "-", "2,400"]
    assert lines[6][-2:] == ["12.3457", "EUR"]
    assert lines[7][:3] == ["total", "-", "1,200"]
    assert lines[7][-1] == "-"


NO_PRICE = [("mail", "2026-01-31", "", "")]


def test_one_line_needs_no_sum_and_none_says_so():
    assert "total" not in usage_table(report(PRICED), "model")
    assert usage_table(report(), "day") == "2026-01-02 to 2026-01-31 (UTC): nothing was used"


def test_csv_is_exact_and_is_read_back_as_it_was():
    odd = report(("search", 'a,"b"\nc', "EUR", "0.000000000001"))
    (row,) = csv.DictReader(io.StringIO(usage_csv(odd, "model")))
    assert row.pop("device_seconds") == "61.234567"
    assert row == {
        "tenant": "search", "model": 'a,"b"\nc', "currency": "EUR", "cost": "0.000000000001",
        **{name: str(count) for name, count in LINE.items() if name != "device_us"},
    }  # fmt: skip


class Ledger(FakeChat):
    """Notes what is asked and answers with two lines, or refuses."""

    asked = None
    error = None

    def GetUsage(self, request, context):  # noqa: N802 - the wire's name
        self.asked = request
        if self.error is not None:
            refuse(context, self.error)
        return TWO


def run(*flags, service=None):
    with serving(service or Ledger()) as server:
        result = CliRunner().invoke(main, ["usage", "--address", server.address, *flags])
        return result, server.asked


def test_what_is_asked_for_is_what_the_flags_say():
    result, asked = run(
        "--tenant", "mail", "--since", "2026-01-02", "--until", "2026-01-31", "--by", "model"
    )
    assert result.exit_code == 0
    assert "total" not in result.output
    assert (asked.tenant, asked.since_day, asked.until_day) == ("mail", "2026-01-02", "2026-01-31")
    assert asked.group_by == chat_pb2.USAGE_GROUP_MODEL
    result, asked = run("--since", "7d", "--csv")
    assert asked.since_day == (datetime.now(UTC).date() - timedelta(days=6)).isoformat()
    assert result.output == usage_csv(TWO, "day")


@pytest.mark.parametrize("since", ["0d", "week", "7", "2026-1-1", "9999d", "٧d"])
def test_a_day_that_is_none_is_refused_before_anybody_is_asked(since):
    result, asked = run("--since", since)
    assert (result.exit_code, asked) == (2, None)
    assert "7d" in result.output


def test_a_refusal_is_one_line():
    service = Ledger()
    problem = "the API key may not read the usage of other tenants"
    service.error = RequestError(Reason.METHOD_FORBIDDEN, problem)
    result, _ = run("--tenant", "mail", service=service)
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert problem in result.output
