"""What a client leaves unread is bounded by what it holds, whatever it tells of."""

import asyncio

import pytest

from router.delivery import Delivery
from router.events import PromptDelta, TextDelta, TokenAlternative, TokenInfo
from tests.support.waiting import until

ALTERNATIVES = [TokenAlternative(number, b"x", -1.0) for number in range(20)]
# 86 KB as they are weighed: 13 are more than a client may leave unread.
TOKENS = [TokenInfo(number, b"x", -1.0, ALTERNATIVES) for number in range(64)]


class Client:
    """Reads as many events as it is let; one write is under way until it may return."""

    def __init__(self):
        self.now = 0.0
        self.delivery = Delivery(lambda: self.now)
        self.read, self.may_read = [], asyncio.Semaphore(0)

    async def write(self, event):
        await self.may_read.acquire()
        self.read.append(event)

    async def reads(self, count):
        for _ in range(count):
            self.may_read.release()
        await until(self.may_read.locked)
        await asyncio.sleep(0)

    @property
    def is_overdue(self):
        return self.delivery.overdue() is not None


@pytest.fixture
async def client():
    client = Client()
    pumping = asyncio.create_task(client.delivery.pump(client.write))
    yield client
    pumping.cancel()
    await asyncio.gather(pumping, return_exceptions=True)


async def test_a_prompt_that_comes_at_once_ends_no_client_that_goes_on_reading(client):
    for _ in range(40):
        client.delivery.put(PromptDelta(TOKENS))
    for _ in range(40):
        await asyncio.sleep(0)
        assert not client.is_overdue
        client.now += 0.9
        assert not client.is_overdue
        await client.reads(1)
    assert len(client.read) == 40


@pytest.mark.parametrize("taken", [False, True])
async def test_one_that_does_not_read_it_is_ended_by_what_it_holds(client, taken):
    """Before its writer has taken it, and while that holds all of it."""
    if not taken:
        client.delivery.put(TextDelta("begin"))
        await asyncio.sleep(0)
    for _ in range(13):
        client.delivery.put(PromptDelta(TOKENS))
    await asyncio.sleep(0)
    client.now = 1.0
    assert not client.is_overdue
    client.now = 1.01
    assert client.is_overdue
    await client.reads(3)
    client.now += 1.01
    assert not client.is_overdue


async def test_text_is_too_much_at_once_and_what_was_read_weighs_nothing(client):
    for _ in range(3):
        client.delivery.put(TextDelta("x" * 600_000))
        await asyncio.sleep(0)
    assert client.is_overdue
    await client.reads(2)
    assert not client.is_overdue
    for _ in range(1000):
        client.delivery.put(TextDelta("x" * 1000))
        await asyncio.sleep(0)
        await client.reads(1)
        assert not client.is_overdue
    assert client.delivery._taken.all == client.delivery._waiting.all == 0
