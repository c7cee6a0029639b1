"""`noria usage`: what tenants used, and what it cost."""

import csv
import io
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import click

from noria.cli.administering import ADDRESS, administering, columns
from noria.cli.terminal import one_line
from noria.client.tls import Tls
from noria.v1 import chat_pb2

_GROUPS = {"day": chat_pb2.USAGE_GROUP_DAY, "model": chat_pb2.USAGE_GROUP_MODEL}
_COUNTS = (
    "requests", "lost_requests", "prompt_tokens", "cached_tokens", "generated_tokens",
    "delivered_tokens", "wasted_tokens",
)  # fmt: skip
_LEGEND = (
    "PROMPT and OUTPUT are charged, CACHED is part of PROMPT; WASTED was computed and sent to "
    "nobody; LOST requests ended with their router; DEVICE is the workers' time."
)


class _Since(click.ParamType[str]):
    """A day such as 2026-01-31, or how many days there are until today, such as 7d."""

    name = "day"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        text = str(value)
        back = re.fullmatch(r"([0-9]{1,3})d", text)
        if back and int(back[1]):
            first = datetime.now(UTC).date() - timedelta(days=int(back[1]) - 1)
            return first.isoformat()
        if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
            self.fail("a day as 2026-01-31, or days until today as 7d", param, ctx)
        return text


@click.command()
@click.option("--tenant", default="", help="Left out: one's own; all, for an administrator.")
@click.option("--since", type=_Since(), help="A day as 2026-01-31 (UTC), or 7d.")
@click.option("--until", default="", help="The last day; left out: today.")
@click.option(
    "--by", type=click.Choice(list(_GROUPS)), default="day", show_default=True, help="One line for."
)
@click.option("--csv", "as_csv", is_flag=True, help="Exact, for other programs.")
@ADDRESS
@click.pass_obj
def usage(
    tls: Tls | None,
    /,
    tenant: str,
    since: str | None,
    until: str,
    by: str,
    as_csv: bool,
    address: str,
) -> None:
    """Show what was used, by tenant and day or model.

    30 days unless --since says otherwise.
    """
    request = chat_pb2.GetUsageRequest(
        tenant=tenant, since_day=since or "", until_day=until, group_by=_GROUPS[by]
    )
    with administering(address, tls) as client:
        report = client.call(client.chat.GetUsage, request)
    click.echo(usage_csv(report, by) if as_csv else usage_table(report, by), nl=not as_csv)


def usage_csv(report: chat_pb2.GetUsageResponse, by: str) -> str:
    """One line for each of the report's, with a header; nothing is rounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("tenant", by, *_COUNTS, "device_seconds", "currency", "cost"))
    for line in report.lines:
        counts = [getattr(line, name) for name in _COUNTS]
        device_s = f"{Decimal(line.device_us).scaleb(-6):f}"
        writer.writerow((line.tenant, line.group, *counts, device_s, line.currency, line.cost))
    return out.getvalue()


def usage_table(report: chat_pb2.GetUsageResponse, by: str) -> str:
    """For people: lines, their sum for each currency, and what the columns mean."""
    days = f"{report.since_day} to {report.until_day} (UTC)"
    if not report.lines:
        return f"{days}: nothing was used"
    head = (
        "TENANT", by.upper(), "REQUESTS", "LOST", "PROMPT", "CACHED", "OUTPUT", "WASTED",
        "DEVICE", "COST",
    )  # fmt: skip
    rows = [_cells(line) for line in [*report.lines, *_sums(report.lines)]]
    return f"{days}\n\n{columns(head, rows)}\n\n{_LEGEND}"


def _cells(line: chat_pb2.UsageLine) -> tuple[str, ...]:
    counts = (
        line.requests, line.lost_requests, line.prompt_tokens, line.cached_tokens,
        line.delivered_tokens, line.wasted_tokens,
    )  # fmt: skip
    device = f"{line.device_us / 1e6:,.1f}s"
    cost = f"{Decimal(line.cost):,.4f} {line.currency}" if line.cost else ""
    return line.tenant, one_line(line.group), *(f"{n:,}" for n in counts), device, cost


def _sums(lines: Sequence[chat_pb2.UsageLine]) -> list[chat_pb2.UsageLine]:
    """One line for each currency and for what has none, unless each has one line already."""
    sums: dict[str, chat_pb2.UsageLine] = {}
    for line in lines:
        total = sums.setdefault(
            line.currency, chat_pb2.UsageLine(tenant="total", currency=line.currency)
        )
        for name in (*_COUNTS, "device_us"):
            setattr(total, name, getattr(total, name) + getattr(line, name))
        if line.cost:
            total.cost = f"{Decimal(total.cost or 0) + Decimal(line.cost):f}"
    return list(sums.values()) if len(lines) > len(sums) else []
