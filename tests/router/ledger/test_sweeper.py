"""Only routers that are gone are swept, and not in the moment in which all seem to be."""

from router.ledger.row import LOST, UsageRow
from router.ledger.sweeper import Sweeper
from router.store.memory_leases import MemoryLeases
from router.store.memory_ledger import MemoryLedger


class House:
    """Routers that share a store; their clock is the test's."""

    def __init__(self):
        self.now = 1000.0
        self.leases, self.ledger, self.lost = MemoryLeases(self.clock), MemoryLedger(), []

    def clock(self):
        return self.now

    def sweeper(self, name):
        return Sweeper(
            name, self.leases, self.ledger, lease_s=15, clock=self.clock, wall_clock=self.clock,
            on_lost=lambda *news: self.lost.append((name, *news)),
        )  # fmt: skip

    async def open(self, router, *numbers):
        await self.ledger.open(
            [UsageRow(f"{router}-{n}", router, "t", "k", "m", 0) for n in numbers]
        )

    async def turns(self, count, *sweepers):
        """Every five seconds."""
        for _ in range(count):
            for sweeper in sweepers:
                await sweeper.turn()
            self.now += 5

    async def outcomes(self):
        return {row.request_id: row.outcome for row in await self.ledger.rows("1970-01-01")}


async def test_rows_of_a_router_that_is_silent_for_a_lease_are_lost_and_no_others():
    house = House()
    a, b = house.sweeper("a"), house.sweeper("b")
    await house.open("a", 1, 2)
    await house.open("b", 1)
    await house.turns(4, a, b)
    assert house.lost == []
    await house.turns(2, b)
    assert house.lost == []
    await house.turns(2, b)
    assert house.lost == [("b", "a", 2)]
    assert await house.outcomes() == {"a-1": LOST, "a-2": LOST}


async def test_one_that_has_just_come_does_not_judge_the_others():
    """After an outage of the store every lease has run out; each first renews its own."""
    house = House()
    await house.open("a", 1)
    late = house.sweeper("late")
    await house.turns(3, late)
    assert house.lost == []
    await house.turns(1, late)
    assert house.lost == [("late", "a", 1)]


async def test_a_router_never_sweeps_itself():
    house = House()
    a = house.sweeper("a")
    await house.open("a", 1)
    await house.turns(4, a)
    house.now += 100
    await house.leases.release("routers", "a")
    assert await a._sweep() == 0


async def test_one_that_left_is_swept_at_once():
    house = House()
    a, b = house.sweeper("a"), house.sweeper("b")
    await house.turns(4, a, b)
    await house.open("a", 1)
    await a.release()
    await house.turns(1, b)
    assert house.lost == [("b", "a", 1)]
