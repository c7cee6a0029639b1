"""The ledger: the same in memory and in Redis. Each request has one row, counted once."""

import asyncio
import json
import time
from dataclasses import replace
from decimal import Decimal

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.ledger.prices import Price
from router.ledger.row import LOST, SERVED, UsageRow, encode_row
from router.ledger.totals import add_up
from router.store.ledger_store import Retention
from router.store.memory_ledger import MemoryLedger
from router.store.redis_connection import redis_connection
from router.store.redis_ledger import RedisLedger, _open_key

DAY_US = 24 * 3600 * 1_000_000
# Rows of days long past would be trimmed as they are written.
TODAY_US = 4_000_000_000_000_000
TODAY = "2096-10-02"
PRICE = Price("EUR", Decimal("0.15"), Decimal("0.075"), Decimal("0.60"))


def opened(number, router_id="r1", tenant="search", model="chat", price=PRICE, day=0):
    return UsageRow(
        f"req-{router_id}-{number}", router_id, tenant, "k1", model, TODAY_US + day * DAY_US, price
    )


def closed(row, outcome=SERVED, tokens=7):
    return replace(
        row, outcome=outcome, ended_us=row.started_us + 1, prompt_tokens=100, cached_tokens=16,
        generated_tokens=tokens + 2, delivered_tokens=tokens, device_us=1234,
    )  # fmt: skip


@pytest.fixture(params=["memory", "redis"])
async def ledger(request):
    if request.param == "memory":
        yield MemoryLedger()
        return
    url = request.getfixturevalue("redis_url")
    async with redis_connection(url, structlog.get_logger(), timeout_s=5) as connection:
        yield RedisLedger(connection)


async def test_a_closed_row_is_as_it_was_told(ledger):
    row = closed(opened(1))
    await ledger.open([opened(1)])
    assert await ledger.open_rows("r1") == [opened(1)]
    await ledger.close([row])
    assert await ledger.rows(TODAY) == [row]
    assert await ledger.open_rows("r1") == []
    assert await ledger.totals([TODAY], None) == add_up([row])
    assert row.cost == Decimal("0.000018")


async def test_whatever_is_written_again_changes_nothing(ledger):
    """A store that did not answer may have done all the same what it is asked for again."""
    row = closed(opened(1))
    for _ in range(2):
        await ledger.open([opened(1)])
        await ledger.close([row, row])
        await ledger.close([replace(row, outcome="CANCELLED", delivered_tokens=0)])
    assert await ledger.rows(TODAY) == [row]
    assert await ledger.totals([TODAY], None) == add_up([row])
    assert await ledger.open_rows("r1") == []


async def test_a_row_that_was_never_opened_is_closed_all_the_same(ledger):
    row = closed(opened(1))
    await ledger.close([row])
    assert await ledger.rows(TODAY) == [row]


async def test_rows_of_a_router_that_is_gone_are_closed_as_lost(ledger):
    await ledger.open([opened(n) for n in range(70)] + [opened(1, "r2")])
    assert await ledger.orphans(["r2"]) == ["r1"]
    while await ledger.lose("r1", TODAY_US + 5):
        pass
    assert await ledger.orphans(["r2"]) == []
    lost = await ledger.rows(TODAY)
    assert {row.request_id for row in lost} == {opened(n).request_id for n in range(70)}
    assert {(row.outcome, row.ended_us, row.delivered_tokens) for row in lost} == {
        (LOST, TODAY_US + 5, 0)
    }
    assert await ledger.totals([TODAY], None) == add_up(lost)
    assert await ledger.open_rows("r2") == [opened(1, "r2")]


async def test_two_sweepers_at_once_close_each_row_once(ledger):
    await ledger.open([opened(n) for n in range(70)])

    async def sweep(now_us):
        closed = 0
        while await ledger.open_rows("r1"):
            closed += await ledger.lose("r1", now_us)
        return closed

    counts = await asyncio.gather(*(sweep(TODAY_US + n) for n in range(4)))
    assert sum(counts) == 70
    assert await ledger.totals([TODAY], None) == add_up(await ledger.rows(TODAY))


async def test_a_router_that_had_only_paused_replaces_lost_by_what_it_knows(ledger):
    """Neither twice nor lost: one row, with the counts of the late closing."""
    await ledger.open([opened(1), opened(2)])
    await ledger.lose("r1", TODAY_US)
    row = closed(opened(1))
    await ledger.close([row])
    await ledger.close([row])
    rows = await ledger.rows(TODAY)
    assert sorted(row.outcome for row in rows) == [LOST, SERVED]
    totals = await ledger.totals([TODAY], None)
    assert totals == add_up(rows)
    (counts,) = totals.values()
    assert (counts.requests, counts.lost, counts.delivered_tokens) == (2, 1, 7)
    assert await ledger.lose("r1", TODAY_US) == 0


async def test_a_late_opening_does_not_open_what_is_closed(ledger):
    await ledger.close([closed(opened(1))])
    await ledger.open([opened(1)])
    assert await ledger.open_rows("r1") == []
    assert await ledger.lose("r1", TODAY_US) == 0


async def test_totals_are_those_of_one_tenant_or_all_by_model_price_and_day(ledger):
    dearer = replace(PRICE, output=Decimal(9))
    rows = [
        closed(opened(1)),
        closed(opened(2, tenant="mail.a_b-c")),
        closed(opened(3, model="other\nname", price=None)),
        closed(opened(4, price=dearer)),
        closed(opened(5, "r2", day=1)),
    ]
    await ledger.close(rows)
    assert await ledger.totals([TODAY], None) == add_up(rows[:4])
    assert await ledger.totals([TODAY], "mail.a_b-c") == add_up(rows[1:2])
    assert await ledger.totals([TODAY, "2096-10-03", "2096-10-04"], None) == add_up(rows)
    assert await ledger.totals([TODAY], "nobody") == {}


async def test_rows_and_totals_are_kept_for_their_days_and_no_longer(redis_server):
    """In memory they go as a new day begins, in Redis they expire by themselves."""
    kept = Retention(row_days=1, total_days=2)
    memory = MemoryLedger(kept)
    async with redis_connection(redis_server.url, structlog.get_logger()) as connection:
        ledger = RedisLedger(connection, kept)
        for day in range(3):
            await memory.close([closed(opened(day, day=day))])
            await ledger.close([closed(opened(day, day=day))])
    days = ["2096-10-02", "2096-10-03", "2096-10-04"]
    assert [len(await memory.rows(day)) for day in days] == [0, 1, 1]
    assert [len(await memory.totals([day], None)) for day in days] == [1, 1, 1]
    with redis_server.client() as client:
        ends = {name: client.expiretime(name) for name in client.scan_iter("*rows*")}
        ends |= {name: client.expiretime(name) for name in client.scan_iter("*totals*")}
        ends |= {name: client.expiretime(name) for name in client.scan_iter("*tenants*")}
    midnight = 4_000_000_000 // 86400 * 86400
    assert ends == {
        f"noria:{{ledger}}:{name.format(day)}": midnight + (n + 1 + days_kept) * 86400
        for name, days_kept in (("rows:{}", 1), ("tenants:{}", 2), ("totals:{}:search", 2))
        for n, day in enumerate(days)
    }


async def test_a_row_too_old_to_be_kept_is_swept_once_all_the_same(redis_url):
    """Two sweepers that found it at once: the second finds neither an open nor a closed row."""
    days_ago_us = int((time.time() - 5 * 86400) * 1e6)
    old = replace(opened(1), started_us=days_ago_us)
    async with redis_connection(redis_url, structlog.get_logger(), timeout_s=5) as connection:
        ledger = RedisLedger(connection, Retention(row_days=1, total_days=400))
        await ledger.open([old])
        lost = old.lost(days_ago_us)
        assert [await ledger._close([lost], only_open=True) for _ in range(2)] == [1, 0]
        assert await ledger.rows(old.day) == []
        assert await ledger.totals([old.day], None) == add_up([lost])


@pytest.mark.parametrize(
    "text", ["{", "[]", "7", "{}", '{"request_id": "x"}', '{"started_us": "soon"}']
)
async def test_what_is_no_row_is_dropped_and_the_others_are_swept(redis_url, text):
    """A row that somebody damaged keeps no other from being closed."""
    whole = json.loads(encode_row(opened(2)))
    damaged = json.dumps(whole | json.loads(text)) if "soon" in text else text
    async with redis_connection(redis_url, structlog.get_logger(), timeout_s=5) as connection:
        ledger = RedisLedger(connection)
        await ledger.open([opened(1)])
        key = _open_key("r1")
        await connection.call(lambda client: client.hset(key, "req-damaged", damaged))
        assert await ledger.lose("r1", TODAY_US) == 2
        assert await ledger.lose("r1", TODAY_US) == 0
        assert [row.outcome for row in await ledger.rows(TODAY)] == [LOST]
        assert await ledger.orphans([]) == []


async def test_a_lone_router_keeps_no_more_rows_than_it_may():
    memory = MemoryLedger(max_rows=3)
    await memory.close([closed(opened(n)) for n in range(5)])
    assert [row.request_id[-1] for row in await memory.rows(TODAY)] == ["2", "3", "4"]
    assert (await memory.totals([TODAY], None)) == add_up([closed(opened(n)) for n in range(5)])


acts = st.lists(
    st.tuples(
        st.sampled_from(["open", "close", "lose"]),
        st.lists(st.integers(0, 5), min_size=1, max_size=4),
        st.sampled_from(["r1", "r2"]),
        st.sampled_from([SERVED, "CANCELLED"]),
    ),
    max_size=25,
)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(acts)
async def test_in_any_order_redis_does_what_memory_does(redis_url, script):
    """And the totals are always those of the rows."""
    memory = MemoryLedger()
    async with redis_connection(redis_url, structlog.get_logger(), timeout_s=5) as connection:
        await connection.call(lambda client: client.flushall())
        ledger = RedisLedger(connection)
        for act, numbers, router, outcome in script:
            for each in (memory, ledger):
                if act == "lose":
                    while await each.lose(router, TODAY_US):
                        pass
                elif act == "open":
                    await each.open([opened(n, router) for n in numbers])
                else:
                    await each.close([closed(opened(n, router), outcome, n) for n in numbers])
        rows = await ledger.rows(TODAY)
        assert by_id(rows) == by_id(await memory.rows(TODAY))
        assert await ledger.totals([TODAY], None) == add_up(rows)
        assert await memory.totals([TODAY], None) == add_up(rows)
        for router in ("r1", "r2"):
            still = await ledger.open_rows(router)
            assert by_id(still) == by_id(await memory.open_rows(router))


def by_id(rows):
    return {row.request_id: row for row in rows}
