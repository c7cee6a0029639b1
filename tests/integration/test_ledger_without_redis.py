"""Redis is stopped and started under load: requests are served, and every row arrives once."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
import structlog

from noria.v1 import chat_pb2
from router.ledger.totals import add_up
from tests.support.replicas import chat_spec, key_of, running_replicas
from tests.support.waiting import until


async def ask(replicas, count):
    """So many through both routers at once; their ids. Raises unless all are served."""

    async def chat(number):
        request = chat_pb2.ChatRequest(spec=chat_spec("네", 3))
        stub = replicas.stubs[number % len(replicas.stubs)]
        return (await stub.Chat(request, metadata=key_of("search"), timeout=60)).request_id

    return set(await asyncio.gather(*map(chat, range(count))))


async def all_rows(replicas):
    days = [(datetime.now(UTC) - timedelta(days=ago)).date().isoformat() for ago in (1, 0)]
    ledger = replicas.store.ledger
    rows = [row for day in days for row in await ledger.rows(day)]
    assert await ledger.totals(days, None) == add_up(rows)
    return rows


@pytest.mark.parametrize("stop", [pytest.param("stop", marks=pytest.mark.soak), "kill", "freeze"])
async def test_rows_wait_and_are_written_once_it_is_back(
    golden_model, script_file, tmp_path, redis_server, stop
):
    """Stopped in order, killed, or silent with its connections open."""
    script = script_file(mean_output_tokens=0, step_seconds=0.002)
    settings = {"redis_timeout_s": 0.3, "lease_s": 30.0}
    with structlog.testing.capture_logs() as lines:
        async with running_replicas(
            golden_model, tmp_path, redis_server.url, router=settings, script=script
        ) as replicas:
            asked = await ask(replicas, 10)
            going = asyncio.create_task(ask(replicas, 30))
            await asyncio.sleep(0.02)
            getattr(redis_server, stop)()
            asked |= await going
            asked |= await ask(replicas, 20)
            assert sum(router.state().ledger_waiting for router in replicas.routers) >= 20
            await until(lambda: any(line["event"] == "ledger_behind" for line in lines))
            redis_server.thaw() if stop == "freeze" else redis_server.start()
            asked |= await ask(replicas, 10)
            await replicas.at_rest()
            await until(lambda: replicas.store.available)
            rows = await all_rows(replicas)
            assert await replicas.open_rows() == []
    assert len(rows) == len(asked) == 70
    assert {row.request_id for row in rows} == asked
    assert {row.outcome for row in rows} == {"SERVED"}
    told = [line["event"] for line in lines if line["event"].startswith("ledger")]
    assert {"ledger_behind", "ledger_written"} == set(told)
    assert len(told) <= 4 + 2


async def test_what_finds_no_room_is_counted_and_told_once(
    golden_model, script_file, tmp_path, redis_server
):
    """Ten rows wait; the others are dropped, and no request knows of it."""
    script = script_file(mean_output_tokens=0)
    settings = {"redis_timeout_s": 0.3, "ledger_max_rows": 10}
    with structlog.testing.capture_logs() as lines:
        async with running_replicas(
            golden_model, tmp_path, redis_server.url, num_routers=1, router=settings, script=script
        ) as replicas:
            redis_server.stop()
            await ask(replicas, 25)
            (router,) = replicas.routers
            assert (router.state().ledger_waiting, router.state().ledger_dropped) == (10, 15)
            redis_server.start()
            await replicas.at_rest()
            assert len(await all_rows(replicas)) == 10
    told = [line for line in lines if line["event"].startswith("ledger")]
    assert [line["event"] for line in told] == [
        "ledger_behind", "ledger_overflow", "ledger_written",
    ]  # fmt: skip
    assert told[-1]["dropped"] == 15
