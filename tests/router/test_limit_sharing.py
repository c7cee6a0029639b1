"""Routers that share limits: what they grant together, and that it all comes back."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.reasons import Reason, RequestError
from router import limit_sharing
from router.auth import Tenant
from router.limit_book import Books
from router.limit_decision import Ask
from router.limit_sharing import LimitSharing
from router.limiter import Limiter
from router.store.base import StoreUnavailableError
from router.store.memory_limits import MemoryLimits
from router.tenant_limits import TenantLimits
from tests.support.virtual_time import run_virtually

LEASE_S = 15.0
SETTLED_S = 1.0


class Shared:
    """A store that takes its time, may go away, and may lose answers."""

    def __init__(self, delay_s=0.001):
        self.limits = MemoryLimits(now)
        self.delay_s = delay_s
        self.up = asyncio.Event()
        self.up.set()
        self.loses_answers = False
        self.heard = []

    @property
    def available(self):
        return self.up.is_set()

    async def wait_available(self):
        await self.up.wait()

    async def exchange(self, router, statements, lease_s):
        if not self.available:
            raise StoreUnavailableError("away")
        await asyncio.sleep(self.delay_s)
        verdicts = await self.limits.exchange(router, statements, lease_s)
        self.heard.append(
            (router, [s.tenant for s in statements], sum(len(s.asks) for s in statements))
        )
        if self.loses_answers:
            self.up.clear()
            raise StoreUnavailableError("lost")
        return verdicts

    def state(self, tenant):
        return self.limits._tenants[tenant]

    def held(self, tenant):
        """What living routers hold there, together."""
        leases = self.state(tenant).leases.values()
        accounts = [lease.account for lease in leases if lease.expires_ms > now() * 1000]
        return tuple(
            sum(getattr(account, name) for account in accounts)
            for name in ("concurrent", "encodes", "open_tokens")
        )


def now():
    return asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def router(store, name="one"):
    """One router's side, and a way to see inside."""
    books = Books(now, LEASE_S)
    log = structlog.get_logger()
    sharing = LimitSharing(store, books, name, clock=now, log=log, lease_s=LEASE_S)
    async with sharing.running():
        limiter = Limiter(books, sharing)
        limiter.books, limiter.told = books, sharing
        yield limiter


def tenant(name="t", **limits):
    return Tenant(name, limits=TenantLimits(**limits))


def nothing():
    return 0


async def reason_of(work):
    with pytest.raises(RequestError) as caught:
        await work
    return caught.value.reason


async def waits(task, store):
    """Let the task come to its wait for the store."""
    await asyncio.sleep(store.delay_s / 2)
    assert not task.done()


@dataclass
class Course:
    """One request: when it comes, what it needs, what becomes of it."""

    router: int
    at_s: float
    tokens: int
    choices: int
    encoding_s: float
    running_s: float
    used: float
    leaves_after_s: float
    progress: list = field(default_factory=list)


COURSES = st.builds(
    Course,
    st.integers(0, 1), st.floats(0, 20), st.integers(1, 400), st.integers(1, 2),
    st.floats(0, 0.1), st.floats(0, 10), st.floats(0, 1), st.floats(0, 15),
)  # fmt: skip
# From when on the store is away or loses an answer, and for how long.
OUTAGES = st.lists(st.tuples(st.floats(0, 20), st.floats(0.01, 25), st.booleans()), max_size=2)
LIMITS = {
    "requests_per_minute": 30,
    "tokens_per_minute": 1000,
    "concurrent_requests": 4,
    "concurrent_encodes": 2,
}


async def run(limiter, course, granted):
    """As a request goes through its router; leaves when it is told to, wherever it is."""
    used = 0
    with (
        contextlib.suppress(RequestError, TimeoutError),
        limiter.hold(tenant(**LIMITS), lambda: used) as hold,
    ):
        async with asyncio.timeout(course.leaves_after_s):
            await limiter.take(hold, Ask(1, course.choices, 1, 1, course.tokens // 2 + 1))
            granted.append((course, 1))
            try:
                await asyncio.sleep(course.encoding_s)
                hold.encoded()
                await limiter.fit(hold, course.tokens)
                used = int(course.tokens * course.used)
                await asyncio.sleep(course.running_s)
            finally:
                granted.append((course, -1))
    course.progress.append(used)


async def disturb(store, outages):
    for at_s, lasts_s, loses in outages:
        await asyncio.sleep(max(0, at_s - now()))
        store.loses_answers = loses
        if not loses:
            store.up.clear()
        await asyncio.sleep(lasts_s)
        store.loses_answers = False
        store.up.set()


@settings(max_examples=50, deadline=None)
@given(courses=st.lists(COURSES, min_size=3, max_size=25), outages=OUTAGES)
def test_whatever_happens_everything_comes_back_and_what_was_used_is_charged(courses, outages):
    """RTR-02, for two routers and a store that comes and goes.

    Without outages no limit is ever passed, by both together; with them no router passes it.
    """

    async def scenario():
        store = Shared()
        granted = []
        async with router(store, "one") as one, router(store, "two") as two:
            both = (one, two)

            async def start(course):
                await asyncio.sleep(course.at_s)
                await run(both[course.router], course, granted)

            await asyncio.gather(*map(start, courses), disturb(store, outages))
            await asyncio.sleep(SETTLED_S)
            for index, limiter in enumerate(both):
                book = limiter.books.of("t", TenantLimits(**LIMITS))
                account = book.account
                used = [c.progress[0] for c in courses if c.router == index]
                assert (account.concurrent, account.encodes, account.open_tokens) == (0, 0, 0)
                assert account.tokens == sum(used)
                assert account.requests <= sum(1 for c in courses if c.router == index)
                assert not book.pending
                assert not book.holds
                assert book.known == account or not book.known_at > 0
                assert limiter.told.figures.untold == 0
            if "t" in store.limits:
                assert store.held("t") == (0, 0, 0)
                if not outages:
                    assert store.state("t").tokens_level >= 0
                    assert store.state("t").requests_level >= 0
        for routers in ([0, 1],) if not outages else ([0], [1]):
            assert highest(granted, routers) <= LIMITS["concurrent_requests"]

    run_virtually(scenario())


def highest(granted, routers):
    """The most that ran at these routers at the same time."""
    held = most = 0
    for course, change in granted:
        if course.router in routers:
            held += change * course.choices
            most = max(most, held)
    return most


def virtually(test):
    """The test's waiting takes no time."""

    def run_it(*arguments, **named):
        run_virtually(test(*arguments, **named))

    run_it.__name__, run_it.__doc__ = test.__name__, test.__doc__
    return run_it


@virtually
async def test_two_routers_grant_one_limit_together():
    store, asked = Shared(), tenant(tokens_per_minute=1000)
    async with router(store, "one") as one, router(store, "two") as two:
        with one.hold(asked, nothing) as first, two.hold(asked, nothing) as second:
            await one.take(first, Ask(needed=600, wanted=600))
            assert await reason_of(two.take(second, Ask(needed=600, wanted=600))) is (
                Reason.TOKENS_PER_MINUTE
            )
            await two.take(second, Ask(needed=300, wanted=600))
            assert second.tokens == 400


@virtually
async def test_what_one_gives_back_the_other_may_take_soon_after():
    store, asked = Shared(), tenant(concurrent_requests=1)
    async with router(store, "one") as one, router(store, "two") as two:
        with one.hold(asked, nothing) as hold:
            await one.take(hold, Ask(concurrent=1))
        await asyncio.sleep(2 * limit_sharing.GATHER_S)
        with two.hold(asked, nothing) as hold:
            await two.take(hold, Ask(concurrent=1))


@virtually
async def test_requests_that_come_during_an_exchange_share_the_next():
    store = Shared()
    async with router(store) as one:

        async def ask(number):
            with one.hold(tenant(f"t{number % 3}", requests_per_minute=100), nothing) as hold:
                await one.take(hold, Ask(requests=1))
                await asyncio.sleep(1)

        tasks = [asyncio.create_task(ask(0))]
        await waits(tasks[0], store)
        tasks += [asyncio.create_task(ask(number)) for number in range(50)]
        await asyncio.sleep(3 * store.delay_s)
        assert [asks for _, _, asks in store.heard] == [1, 50]
        await asyncio.gather(*tasks)


@virtually
async def test_who_leaves_while_asking_leaves_nothing_behind():
    """Neither before the store heard of it nor after."""
    store, asked = Shared(), tenant(concurrent_requests=1, tokens_per_minute=10)
    async with router(store) as one:
        for part in (0.1, 0.9, 1.0):

            async def ask():
                with one.hold(asked, nothing) as hold:
                    await one.take(hold, Ask(concurrent=1, needed=10, wanted=10))
                    await asyncio.sleep(100)

            task = asyncio.create_task(ask())
            await asyncio.sleep(part * store.delay_s)
            task.cancel()
            await asyncio.wait({task})
            await asyncio.sleep(SETTLED_S)
            assert store.held("t") == (0, 0, 0)
            assert one.books.of("t", asked.limits).account == one.books.of("t", asked.limits).known
            assert one.books.of("t", asked.limits).account.tokens == 0


@virtually
async def test_who_leaves_before_the_store_is_asked_is_not_asked_for():
    store, asked = Shared(), tenant(requests_per_minute=100)
    async with router(store) as one:

        async def ask():
            with one.hold(asked, nothing) as hold:
                await one.take(hold, Ask(requests=1))
                await asyncio.sleep(1)

        first = asyncio.create_task(ask())
        await waits(first, store)
        second = asyncio.create_task(ask())
        await asyncio.sleep(store.delay_s / 4)
        second.cancel()
        await first
        assert sum(asks for _, _, asks in store.heard) == 1


@virtually
async def test_no_request_waits_for_a_store_that_is_away_nor_fails_for_it():
    """RDS-07. Each router grants what its own buckets allow, and no more."""
    store, asked = Shared(), tenant(tokens_per_minute=1000)
    async with router(store, "one") as one, router(store, "two") as two:
        with one.hold(asked, lambda: 900) as used:
            await one.take(used, Ask(needed=900, wanted=900))
        store.up.clear()
        for limiter, left in ((one, 100), (two, 1000)):
            began = now()
            with limiter.hold(asked, nothing) as hold:
                await limiter.take(hold, Ask(needed=left, wanted=left))
                with limiter.hold(asked, nothing) as more:
                    assert await reason_of(limiter.take(more, Ask(needed=1, wanted=1))) is (
                        Reason.TOKENS_PER_MINUTE
                    )
            assert now() == began
        assert one.told.figures.untold == 1


@virtually
async def test_who_waits_when_the_store_goes_gets_this_router_s_own_decision():
    store = Shared()
    async with router(store) as one:
        with one.hold(tenant(tokens_per_minute=1000), nothing) as hold:
            store.loses_answers = True
            await one.take(hold, Ask(needed=600, wanted=600))
            assert hold.tokens == 600
            store.loses_answers = False
            store.up.set()
            await asyncio.sleep(SETTLED_S)
            # It had heard the first time, too: it is charged once.
            assert store.held("t") == (0, 0, 600)
            assert store.state("t").tokens_level >= 400 * 60_000


@virtually
async def test_when_the_store_is_back_it_hears_what_was_charged_and_is_held():
    store, asked = Shared(), tenant(tokens_per_minute=6000, concurrent_requests=2)
    async with router(store, "one") as one, router(store, "two") as two:
        store.up.clear()
        with one.hold(asked, nothing) as hold:
            await one.take(hold, Ask(concurrent=2, needed=5000, wanted=5000))
            store.up.set()
            await asyncio.sleep(0.5)
            assert store.held("t") == (2, 0, 5000)
            with two.hold(asked, nothing) as other:
                for ask in (Ask(concurrent=1), Ask(needed=1200, wanted=1200)):
                    await reason_of(two.take(other, ask))


@virtually
async def test_a_long_outage_at_the_limit_leaves_no_debt_of_its_length():
    """What was charged ten minutes ago was refilled nine minutes ago."""
    store, asked = Shared(), tenant(tokens_per_minute=60)
    async with router(store) as one:
        store.up.clear()
        for _ in range(600):
            await asyncio.sleep(1)
            with one.hold(asked, lambda: 1) as hold:
                await one.take(hold, Ask(needed=1, wanted=1))
        await asyncio.sleep(30)
        store.up.set()
        await asyncio.sleep(SETTLED_S)
        assert store.state("t").tokens_level >= 59 * 60_000


@virtually
async def test_a_store_that_comes_back_empty_is_told_all_that_is_held():
    store, asked = Shared(), tenant(concurrent_requests=1)
    async with router(store) as one:
        with one.hold(asked, nothing) as hold:
            await one.take(hold, Ask(concurrent=1))
            store.up.clear()
            with one.hold(tenant("another", concurrent_requests=1), nothing) as other:
                await one.take(other, Ask(concurrent=1))
            store.limits._tenants.clear()
            await asyncio.sleep(0.1)
            store.up.set()
            await asyncio.sleep(0.1)
            assert store.held("t") == (1, 0, 0)


@virtually
async def test_leases_are_renewed_for_as_long_as_something_is_held_and_not_longer():
    """All tenants of a router in one exchange; after its death they are free within a lease."""
    store, names = Shared(), ("a", "b", "c")
    async with router(store) as one:
        with contextlib.ExitStack() as held:
            for name in names:
                hold = held.enter_context(one.hold(tenant(name, concurrent_requests=1), nothing))
                await one.take(hold, Ask(concurrent=1))
            store.heard.clear()
            await asyncio.sleep(61)
            assert [store.held(name) for name in names] == [(1, 0, 0)] * 3
            assert [sorted(told) for _, told, _ in store.heard] == [list(names)] * 12
        await asyncio.sleep(SETTLED_S)
        store.heard.clear()
        await asyncio.sleep(60)
        assert not store.heard


@virtually
async def test_many_tenants_are_renewed_in_a_few_exchanges():
    store, names = Shared(), [f"t{number}" for number in range(600)]
    async with router(store) as one:
        with contextlib.ExitStack() as held:
            for name in names:
                hold = held.enter_context(one.hold(tenant(name, concurrent_requests=1), nothing))
                await one.take(hold, Ask(concurrent=1))
            await asyncio.sleep(SETTLED_S)
            store.heard.clear()
            await asyncio.sleep(LEASE_S / 3)
            assert [len(told) for _, told, _ in store.heard] == [256, 256, 88]
            await asyncio.sleep(2 * LEASE_S)
            assert [store.held(name) for name in names] == [(1, 0, 0)] * 600


@virtually
async def test_what_a_dead_router_had_used_stays_charged_and_the_rest_is_free_within_a_lease():
    store, asked = Shared(), tenant(tokens_per_minute=600, concurrent_requests=1)
    async with router(store, "two") as two:
        async with router(store, "one") as one:
            hold = one.hold(asked, lambda: 400).__enter__()
            await one.take(hold, Ask(concurrent=1, needed=600, wanted=600))
            await asyncio.sleep(LEASE_S / 3 + 1)
            # It dies: no loop of its runs any more, and nothing is said.
            one.told._untold.clear()
            one.told._asked.clear()
        with two.hold(asked, nothing) as other:
            await reason_of(two.take(other, Ask(concurrent=1)))
            await asyncio.sleep(LEASE_S)
            await two.take(other, Ask(concurrent=1))
            told = two.take(other, Ask(needed=601, wanted=601, dry_run=True))
            await reason_of(told)
            # 200 came back, and at 10 a second it refills since the beginning.
            level = store.state("t").tokens_level // 60_000
            assert 200 + 10 * now() - 2 <= level <= 200 + 10 * now()


def test_too_many_untold_tenants_are_forgotten_counted_and_logged_once(monkeypatch):
    monkeypatch.setattr(limit_sharing, "MAX_UNTOLD", 3)

    async def scenario():
        store = Shared()
        async with router(store) as one:
            store.up.clear()
            for number in range(5):
                asked = tenant(f"t{number}", tokens_per_minute=10)
                with one.hold(asked, lambda: 10) as hold:
                    await one.take(hold, Ask(needed=10, wanted=10))
            assert (one.told.figures.untold, one.told.figures.dropped) == (3, 2)
            store.up.set()
            await asyncio.sleep(SETTLED_S)
            assert sorted(store.limits._tenants) == ["t2", "t3", "t4"]

    with structlog.testing.capture_logs() as lines:
        run_virtually(scenario())
    assert [line["event"] for line in lines].count("limits_untold_dropped") == 1


@virtually
async def test_a_tenant_that_is_idle_is_forgotten_and_may_come_back():
    store, asked = Shared(), tenant(tokens_per_minute=600)
    async with router(store) as one:
        forgetting = asyncio.create_task(one.forget_idle())
        for _ in range(3):
            with one.hold(asked, lambda: 600) as hold:
                await one.take(hold, Ask(needed=600, wanted=600))
            assert len(one.books) == 1
            await asyncio.sleep(1000)
            assert len(one.books) == 0
        forgetting.cancel()
