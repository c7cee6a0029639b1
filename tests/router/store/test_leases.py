"""Leases: the same in memory and in Redis."""

import asyncio

import pytest
import structlog

from router.store.memory_leases import MemoryLeases
from router.store.opened import open_store


@pytest.fixture(params=["memory", "redis"])
async def leases(request):
    url = request.getfixturevalue("redis_url") if request.param == "redis" else ""
    async with open_store(url, structlog.get_logger(), timeout_s=5) as store:
        yield store.leases


async def test_a_holder_is_alive_until_its_lease_runs_out(leases):
    await leases.renew("workers", "w:1", 0.05)
    await leases.renew("workers", "w:2", 60)
    await leases.renew("routers", "r", 60)
    assert await leases.live("workers") == {"w:1", "w:2"}
    await ended(leases, "w:1")
    assert await leases.live("workers") == {"w:2"}


async def test_renewing_a_lease_lets_it_last_from_then_on(leases):
    await leases.renew("workers", "w:1", 0.05)
    await leases.renew("workers", "w:1", 60)
    await leases.renew("workers", "w:2", 0.05)
    await ended(leases, "w:2")
    assert await leases.live("workers") == {"w:1"}


async def test_a_lease_may_be_given_up_more_than_once_and_unheld(leases):
    await leases.renew("workers", "w:1", 60)
    for holder in ("w:1", "w:1", "never"):
        await leases.release("workers", holder)
    assert await leases.live("workers") == frozenset()


async def ended(leases, holder):
    for _ in range(1000):
        if holder not in await leases.live("workers"):
            return
        await asyncio.sleep(0.002)
    pytest.fail("the lease does not end")


async def test_a_lease_whose_end_was_lost_still_ends(redis_url, shared_redis_server):
    """RDS-03: a set that has no time to live gets one with the next renewal."""
    async with open_store(redis_url, structlog.get_logger(), timeout_s=5) as store:
        await store.leases.renew("workers", "w:1", 60)
        with shared_redis_server.client() as client:
            client.persist("noria:leases:workers")
            await store.leases.renew("workers", "w:2", 30)
            assert 30_000 < client.pttl("noria:leases:workers") <= 60_000


async def test_leases_that_ended_are_forgotten():
    """Nothing grows with the holders that once were."""
    now = 0.0
    leases = MemoryLeases(lambda: now)
    for number in range(100):
        now += 1
        await leases.renew("workers", f"w:{number}", 0.5)
    assert len(leases._ends) == 1
