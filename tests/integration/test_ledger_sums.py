"""What tenants are charged for is what workers computed, to the token and the microsecond."""

import asyncio
import contextlib
import csv
import io
import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import grpc
import pytest
import structlog
from click.testing import CliRunner

from noria.cli.main import main
from noria.v1 import chat_pb2, common_pb2
from router.ledger.totals import GroupBy, add_up, usage_lines
from tests.support.canary import CANARY, disguised
from tests.support.replicas import KEYS, chat_spec, key_of, running_replicas

WAYS = {
    "serve": 8, "close": 3, "cancel": 2, "cancel elsewhere": 2, "deadline": 2,
    "invalid": 1, "too long": 1, "no key": 1,
}  # fmt: skip
PRICES = """
currency = "EUR"
[[models]]
name = "demo"
input = "0.15"
cached_input = "0.075"
output = "0.60"
"""


class Asker:
    """Asks both routers in turn, as two tenants, with a random fate each time."""

    def __init__(self, replicas, rng):
        self.replicas, self.rng = replicas, rng

    async def ask(self, index):
        way = self.rng.choices(list(WAYS), list(WAYS.values()))[0]
        tenant = ("search", "mail")[index % 2]
        here, there = self.rng.sample(range(len(self.replicas.stubs)), 2)
        call = self.replicas.stubs[here].StreamChat(
            chat_pb2.StreamChatRequest(spec=self.spec(index, way)),
            metadata=() if way == "no key" else key_of(tenant),
            timeout=self.rng.random() * 0.1 if way == "deadline" else 60,
        )
        patience = self.rng.randrange(8)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await self.read(call, way, patience, key_of(tenant), (here, there))

    def spec(self, index, way):
        return chat_spec(
            "네?" if way == "serve" else f"{CANARY} 토마토는 " * (index % 40 + 1),
            10**6 if way == "too long" else 1 + index % 12,
            sampling=common_pb2.SamplingParams(temperature=9 if way == "invalid" else 1),
            stop_sequences=["e"] if index % 3 == 0 else [],
            n=1 + index % 2,
        )

    async def read(self, call, way, patience, key, places):
        request_id = dict(await call.initial_metadata()).get("noria-request-id", "")
        while await call.read() is not grpc.aio.EOF:
            patience -= 1
            if patience:
                continue
            if way == "close":
                call.cancel()
            if way.startswith("cancel"):
                stub = self.replicas.stubs[places[way == "cancel elsewhere"]]
                request = chat_pb2.CancelRequestRequest(request_id=request_id)
                await stub.CancelRequest(request, metadata=key)


@pytest.mark.parametrize(
    ("count", "steps_ahead"),
    [
        (60, False),
        pytest.param(2000, False, marks=pytest.mark.soak),
        pytest.param(2000, True, marks=pytest.mark.soak),
    ],
)
async def test_the_ledger_is_the_sum_of_what_the_workers_told(
    golden_model, script_file, tmp_path, redis_url, shared_redis_server, count, steps_ahead
):
    """Served, closed, cancelled from either router, late, refused, several choices."""
    script = script_file(mean_output_tokens=20, step_seconds=0.001, token_ids=[32, 127])
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    with structlog.testing.capture_logs() as lines:
        async with running_replicas(
            golden_model, tmp_path, redis_url, num_workers=2,
            router={"prices_file": prices, "max_queued_requests": 40},
            script=script, num_blocks=128, block_size=16, max_num_seqs=8,
            max_num_batched_tokens=128, async_scheduling=steps_ahead,
        ) as replicas:  # fmt: skip
            asker = Asker(replicas, random.Random(5))
            asking = []
            for index in range(count):
                asking.append(asyncio.create_task(asker.ask(index)))
                await asyncio.sleep(asker.rng.random() * 0.006)
            await asyncio.gather(*asking)
            await replicas.at_rest()
            days = [(datetime.now(UTC) - timedelta(days=ago)).date().isoformat() for ago in (1, 0)]
            ledger = replicas.store.ledger
            rows = [row for day in days for row in await ledger.rows(day)]
            assert await replicas.open_rows() == []
            check_sums(replicas, rows)
            check_each(rows, [line for line in lines if line["event"] == "request"])
            assert await ledger.totals(days, None) == add_up(rows)
            await check_reports(replicas, rows)
            await check_command(replicas, rows)
            kept = shared_redis_server.everything()
            assert "search" in kept
            assert disguised(kept) is None


def check_sums(replicas, rows):
    told = replicas.told()
    assert told.prompt_tokens == sum(row.prompt_tokens for row in rows) > 0
    assert told.cached_tokens == sum(row.cached_tokens for row in rows) > 0
    assert told.generated_tokens == sum(row.generated_tokens for row in rows) > 0
    assert told.device_us == sum(row.device_us for row in rows)
    # Nothing was lost, so that all the time of all the steps is somebody's.
    assert replicas.lost_us() == 0
    assert told.device_us == replicas.busy_us() > 0


def check_each(rows, lines):
    """Each request that reached a worker has one row, and it tells what the log line tells."""
    told = {line["request_id"]: line for line in lines}
    assert max(Counter(row.request_id for row in rows).values()) == 1
    of = {row.request_id: row for row in rows}
    assert {i for i, line in told.items() if line["attempts"]} <= set(of) <= set(told)
    for request_id, row in of.items():
        line = told[request_id]
        assert (row.outcome, row.tenant, row.model) == (
            line["outcome"], line["tenant"], line["model"],
        )  # fmt: skip
        assert row.delivered_tokens == line["output_tokens"] <= row.generated_tokens
        assert row.unconfirmed_tokens == 0
        if row.outcome == "SERVED":
            assert row.prompt_tokens == line["input_tokens"]
            assert row.cached_tokens == line["cached_tokens"]
    assert {"SERVED", "CANCELLED"} <= {row.outcome for row in rows}


async def check_reports(replicas, rows):
    """By day and by model, of one's own and of all, through either router; money is exact."""
    groups = {GroupBy.DAY: "USAGE_GROUP_DAY", GroupBy.MODEL: "USAGE_GROUP_MODEL"}
    for stub in replicas.stubs:
        for tenant in ("search", "mail", "operators"):
            for by, name in groups.items():
                told = await stub.GetUsage(
                    chat_pb2.GetUsageRequest(group_by=name), metadata=key_of(tenant)
                )
                seen = [row for row in rows if tenant in (row.tenant, "operators")]
                lines = usage_lines(add_up(seen), by)
                assert [(line.tenant, line.group, line.cost) for line in told.lines] == [
                    (line.tenant, line.group, f"{line.cost:f}") for line in lines
                ]
                assert sum(line.device_us for line in told.lines) == sum(
                    row.device_us for row in seen
                )


async def check_command(replicas, rows):
    """What `noria usage` writes for other programs is the ledger's sum to the last digit."""
    flags = ["usage", "--address", replicas.routers[1].address, "--by", "model"]
    environment = {"NORIA_API_KEY": KEYS["operators"]}
    run = CliRunner().invoke
    exact = await asyncio.to_thread(run, main, [*flags, "--csv"], env=environment)
    lines = list(csv.DictReader(io.StringIO(exact.output)))
    assert sum(int(line["requests"]) for line in lines) == len(rows)
    for name in ("prompt", "cached", "generated", "delivered", "wasted"):
        told = sum(int(line[f"{name}_tokens"]) for line in lines)
        assert told == sum(getattr(row, f"{name}_tokens") for row in rows)
    assert sum(Decimal(line["cost"]) for line in lines) == sum(row.cost for row in rows) > 0
    told_us = sum(Decimal(line["device_seconds"]) for line in lines) * 10**6
    assert told_us == sum(row.device_us for row in rows)
    table = await asyncio.to_thread(run, main, flags, env=environment)
    assert [line.split()[:2] for line in table.output.splitlines()[3:5]] == [
        ["mail", "demo"], ["search", "demo"],
    ]  # fmt: skip
