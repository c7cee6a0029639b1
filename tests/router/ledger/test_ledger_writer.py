"""Rows reach the store once it takes them, whatever it did before, in the order of their coming."""

import asyncio
from dataclasses import replace

import pytest

from router.ledger.row import SERVED, UsageRow
from router.ledger.writer import BATCH, LedgerWriter
from router.store.base import StoreUnavailableError
from router.store.memory_ledger import MemoryLedger
from tests.support.waiting import until


def row(number):
    return UsageRow(f"req-{number}", "r", "t", "k", "m", number)


def closing(number):
    return replace(row(number), outcome=SERVED)


class FailingLedger(MemoryLedger):
    """Fails on demand: before it does what it was asked, or after."""

    def __init__(self):
        super().__init__()
        self.away = ""
        self.calls = 0

    async def close(self, rows):
        self.calls += 1
        assert len(rows) <= BATCH
        await asyncio.sleep(0)
        if self.away == "before":
            raise StoreUnavailableError
        await super().close(rows)
        if self.away == "after":
            raise StoreUnavailableError


@pytest.fixture
def told():
    return []


@pytest.fixture
def store():
    return FailingLedger()


@pytest.fixture
async def writer(store, told):
    writer = LedgerWriter(store, lambda event, figures: told.append(event), max_rows=200)
    running = asyncio.create_task(writer.run())
    yield writer
    running.cancel()


async def ids(store):
    return [int(row.request_id[4:]) for row in await store.rows("1970-01-01")]


@pytest.mark.parametrize("away", ["before", "after"])
async def test_while_the_store_is_away_rows_wait_and_then_arrive_once(store, writer, told, away):
    store.away = away
    for number in range(120):
        writer.open(row(number))
        writer.close(closing(number))
    await until(lambda: store.calls > 2)
    assert writer.waiting == 120
    store.away = ""
    await until(lambda: writer.waiting == 0)
    assert await ids(store) == list(range(120))
    assert told == ["ledger_behind", "ledger_written"]
    assert writer.dropped == 0


async def test_rows_that_come_together_go_together(store, writer):
    for number in range(BATCH):
        writer.close(closing(number))
    await until(lambda: writer.waiting == 0)
    assert store.calls == 1


async def test_a_writer_that_is_cancelled_while_it_writes_loses_nothing(store, told):
    writer = LedgerWriter(store, lambda event, figures: told.append(event))
    writer.close(closing(1))
    running = asyncio.create_task(writer.run())
    await until(lambda: store.calls == 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await writer.flush(1.0) == 0
    assert await ids(store) == [1]


async def test_a_flush_gives_up_in_time_and_says_what_is_left(store, told):
    writer = LedgerWriter(store, lambda event, figures: told.append(event))
    store.away = "before"
    writer.close(closing(1))
    assert await writer.flush(0.05) == 1


async def test_an_opening_does_not_wait_for_a_closing_that_is_being_written(told):
    class Slow(MemoryLedger):
        async def close(self, rows):
            await asyncio.Event().wait()

    store = Slow()
    writer = LedgerWriter(store, lambda event, figures: told.append(event))
    running = asyncio.create_task(writer.run())
    writer.close(closing(1))
    await asyncio.sleep(0)
    writer.open(row(2))
    await until(lambda: writer.waiting == 1)
    assert await store.open_rows("r") == [row(2)]
    running.cancel()
