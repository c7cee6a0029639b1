"""Usage reports on the wire."""

from noria.v1 import chat_pb2
from router.ledger.totals import GroupBy, UsageLine
from router.usage import UsageQuestion, UsageReport


def question(request: chat_pb2.GetUsageRequest) -> UsageQuestion:
    """An unspecified or unknown group is by day."""
    by_model = request.group_by == chat_pb2.USAGE_GROUP_MODEL
    by = GroupBy.MODEL if by_model else GroupBy.DAY
    return UsageQuestion(request.tenant, request.since_day, request.until_day, by)


def report(told: UsageReport) -> chat_pb2.GetUsageResponse:
    """Amounts of money as decimals in plain notation, exact."""
    return chat_pb2.GetUsageResponse(
        since_day=told.since_day, until_day=told.until_day, lines=map(_line, told.lines)
    )


def _line(line: UsageLine) -> chat_pb2.UsageLine:
    counts = line.counts
    return chat_pb2.UsageLine(
        tenant=line.tenant,
        group=line.group,
        requests=counts.requests,
        lost_requests=counts.lost,
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        generated_tokens=counts.generated_tokens,
        delivered_tokens=counts.delivered_tokens,
        wasted_tokens=counts.wasted_tokens,
        device_us=counts.device_us,
        currency=line.currency,
        cost="" if line.cost is None else f"{line.cost:f}",
    )
