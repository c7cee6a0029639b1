"""Limits: one model, written apart, and both stores say the same of any course of events."""

import itertools
import math
import time
from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.limit_decision import Account, Ask, Limit, Statement, Verdict
from router.store.memory_limits import MemoryLimits
from router.store.redis_connection import redis_connection
from router.store.redis_limits import RedisLimits, limits_key
from router.tenant_limits import TenantLimits

LEASE_S = 5.0
ROUTERS = ("one", "two", "three")
_names = (f"tenant-{number}" for number in itertools.count())
_numbers = itertools.count(1)


class InMemory:
    """A store whose clock a test moves."""

    def __init__(self):
        self.now = 50_000
        self.store = MemoryLimits(lambda: self.now / 1000)

    def age(self, tenant, ms):
        self.now += ms

    def forget(self, tenant):
        self.store._tenants.pop(tenant, None)

    def told_at(self, tenant):
        return self.now


class InRedis:
    """A store whose past a test moves, since the server's clock is its own."""

    def __init__(self, connection, client):
        self.store = RedisLimits(connection)
        self.client = client

    def age(self, tenant, ms):
        key = limits_key(tenant)
        for name, value in self.client.hgetall(key).items():
            if name == "at":
                self.client.hset(key, name, int(value) - ms)
            elif name.startswith("r:"):
                expires, *rest = value.split()
                self.client.hset(key, name, " ".join([str(int(expires) - ms), *rest]))

    def forget(self, tenant):
        self.client.delete(limits_key(tenant))

    def told_at(self, tenant):
        return int(self.client.hget(limits_key(tenant), "at"))


def opened(server):
    return redis_connection(server.url, structlog.get_logger(), timeout_s=5)


@pytest.fixture(params=["memory", "redis"])
async def kept(request):
    if request.param == "memory":
        yield InMemory()
        return
    server = request.getfixturevalue("shared_redis_server")
    with server.client() as client:
        async with opened(server) as connection:
            yield InRedis(connection, client)


@dataclass
class Model:
    """The same rules in fractions of a token. `shift` is by how much its past was moved."""

    at: int = 0
    levels: dict = field(default_factory=dict)
    leases: dict = field(default_factory=dict)

    def age(self, ms):
        self.at -= ms
        self.leases = {
            router: (end - ms, account, number)
            for router, (end, account, number) in self.leases.items()
        }

    def exchange(self, router, told, now):
        if router in self.leases:
            end, _, number = self.leases[router]
            if end > now and told.number <= number:
                return []
        rates = {"r": told.limits.requests_per_minute, "t": told.limits.tokens_per_minute}
        minutes = Fraction(min(max(now - self.at, 0), 120_000), 60_000)
        for kind, rate in rates.items():
            if rate is None:
                self.levels.pop(kind, None)
            else:
                level = max(self.levels.get(kind, rate), -rate)
                self.levels[kind] = min(level + minutes * rate, rate)
        self.at = now
        for name, (end, account, number) in list(self.leases.items()):
            end = min(end, now + LEASE_S * 1000)
            self.leases[name] = (end, account, number)
            if end <= now:
                del self.leases[name]
                self.add("t", account.open_tokens, rates)
        if router in self.leases:
            requests, tokens = self.leases[router][1].requests, self.leases[router][1].tokens
        else:
            requests, tokens = told.known.requests, told.known.tokens - told.known.open_tokens
        self.add("r", -min(told.account.requests - requests, told.lacking_requests), rates)
        self.add("t", -min(told.account.tokens - tokens, told.lacking_tokens), rates)
        mine = replace(told.account)
        self.leases[router] = (now + LEASE_S * 1000, mine, told.number)
        return [self.decide(ask, mine, told.limits, rates) for ask in told.asks]

    def add(self, kind, amount, rates):
        if kind in self.levels:
            self.levels[kind] = max(-rates[kind], min(self.levels[kind] + amount, rates[kind]))

    def decide(self, ask, mine, limits, rates):
        told = []
        for kind, limit, amount in (("r", Limit(1), ask.requests), ("t", Limit(2), ask.needed)):
            # Who needs none is not kept from it by a debt.
            if kind in self.levels and amount and amount > self.levels[kind]:
                wait = math.ceil(Fraction(amount - self.levels[kind]) / rates[kind] * 60_000)
                told.append(Verdict(0, limit, wait, math.floor(max(self.levels[kind], 0))))
        for limit, name, bound, amount in (
            (Limit(3), "concurrent", limits.concurrent_requests, ask.concurrent),
            (Limit(4), "encodes", limits.concurrent_encodes, ask.encodes),
        ):
            held = sum(getattr(account, name) for _, account, _ in self.leases.values())
            if bound is not None and amount and held + amount > bound:
                told.append(Verdict(0, limit, 1000, max(0, bound - held)))
        if told:
            return max(told, key=lambda verdict: verdict.wait_ms)
        tokens = ask.wanted
        if "t" in self.levels:
            tokens = min(tokens, math.floor(max(self.levels["t"], 0)))
        if not ask.dry_run:
            self.add("r", -ask.requests, rates)
            self.add("t", -tokens, rates)
            grant(mine, ask, tokens)
        return Verdict(tokens, left=math.floor(max(self.levels.get("t", 0), 0)))


def grant(account, ask, tokens):
    account.concurrent += ask.concurrent
    account.encodes += ask.encodes
    account.requests += ask.requests
    account.tokens += tokens
    account.open_tokens += tokens


def limit(bound):
    return st.none() | st.integers(1, bound)


LIMITS = st.builds(TenantLimits, limit(100), limit(10_000) | st.just(10**10), limit(10), limit(5))
TOKENS = st.integers(0, 6000)
ASKS = st.builds(
    lambda r, c, e, needed, more, dry: Ask(r, c, e, needed, needed + more, dry),
    st.integers(0, 1), st.integers(0, 4), st.integers(0, 1), TOKENS, TOKENS,
    st.sampled_from([False, False, False, True]),
)  # fmt: skip
EVENTS = st.one_of(
    st.tuples(st.just("tell"), st.sampled_from(ROUTERS), st.lists(ASKS, max_size=3), st.booleans()),
    # What a router did by itself: gave back, or took while it could not ask.
    st.tuples(
        st.just("alone"), st.sampled_from(ROUTERS), st.integers(-4000, 4000), st.integers(0, 3)
    ),
    st.tuples(st.just("age"), st.one_of(st.integers(1, 3000), st.integers(-4000, 130_000))),
    st.tuples(st.just("limit"), LIMITS),
    # A statement that was overtaken: told by how many ago.
    st.tuples(st.just("late"), st.integers(1, 4)),
    st.just(("forget",)),
)  # fmt: skip


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(first=LIMITS, events=st.lists(EVENTS, min_size=4, max_size=14))
async def test_both_stores_decide_as_the_model_does(kept, first, events):
    """Whatever routers ask, give back, take alone, lose the answer of, or are silent for."""
    tenant, model, limits = next(_names), Model(), first
    accounts = {router: (Account(), Account()) for router in ROUTERS}
    statements = []
    for event in events:
        if event[0] == "limit":
            limits = event[1]
        elif event[0] == "forget":
            kept.forget(tenant)
            model = Model()
        elif event[0] == "age":
            kept.age(tenant, event[1])
            if isinstance(kept, InRedis):
                model.age(event[1])
        elif event[0] == "late":
            if len(statements) >= event[1]:
                router, told = statements[-event[1]]
                (verdicts,) = await kept.store.exchange(router, [told], LEASE_S)
                # Without an exchange nothing tells the store's time; any that is past will do.
                assert verdicts == model.exchange(router, told, kept.told_at(tenant))
        elif event[0] == "alone":
            alone(accounts[event[1]][0], event[2], event[3])
        else:
            _, router, asks, answer_is_lost = event
            account, known = accounts[router]
            number = next(_numbers)
            told = Statement(tenant, limits, replace(account), known, 2, 3000, number, asks)
            statements.append((router, told))
            (verdicts,) = await kept.store.exchange(router, [told], LEASE_S)
            assert verdicts == model.exchange(router, told, kept.told_at(tenant))
            if not answer_is_lost:
                heard(accounts, router, asks, verdicts)


def alone(account, tokens, count):
    tokens = max(tokens, -account.open_tokens)
    account.tokens += tokens
    account.open_tokens += tokens
    account.concurrent = count
    account.requests += count


def heard(accounts, router, asks, verdicts):
    account, _ = accounts[router]
    for ask, verdict in zip(asks, verdicts, strict=True):
        if verdict.refused_by is None and not ask.dry_run:
            grant(account, ask, verdict.tokens)
    accounts[router] = (account, replace(account))


def told(tenant, limits, account=None, asks=(), known=None):
    account = account or Account()
    return Statement(
        tenant, limits, account, known or account, 10**10, 10**10, next(_numbers), asks
    )


async def test_a_silent_router_holds_nothing_once_its_lease_has_run_out(kept):
    """RTR-02, RDS-03: neither counts nor tokens that it reserved and did not use."""
    tenant, limits = next(_names), TenantLimits(None, 1000, 2, 1)
    ask = Ask(concurrent=2, encodes=1, needed=1000, wanted=1000)
    (first,) = await kept.store.exchange("one", [told(tenant, limits, asks=[ask])], LEASE_S)
    (second,) = await kept.store.exchange("two", [told(tenant, limits, asks=[ask])], LEASE_S)
    assert first == [Verdict(1000)]
    assert second[0].refused_by is Limit.TOKENS_PER_MINUTE
    kept.age(tenant, 4900)
    (third,) = await kept.store.exchange("two", [told(tenant, limits, asks=[ask])], LEASE_S)
    assert third[0].refused_by is Limit.TOKENS_PER_MINUTE
    kept.age(tenant, 200)
    (fourth,) = await kept.store.exchange("two", [told(tenant, limits, asks=[ask])], LEASE_S)
    assert fourth == [Verdict(1000)]


async def test_a_clock_that_steps_back_lengthens_no_lease(kept):
    """An hour back: the lease runs out one lease after it was seen, not an hour later."""
    tenant, limits, ask = next(_names), TenantLimits(concurrent_requests=1), Ask(concurrent=1)
    await kept.store.exchange("one", [told(tenant, limits, asks=[ask])], LEASE_S)
    kept.age(tenant, -3_600_000)
    (seen,) = await kept.store.exchange("two", [told(tenant, limits, asks=[ask])], LEASE_S)
    assert seen == [Verdict(0, Limit.CONCURRENT_REQUESTS, 1000, 0)]
    kept.age(tenant, 5_100)
    (later,) = await kept.store.exchange("two", [told(tenant, limits, asks=[ask])], LEASE_S)
    assert later == [Verdict()]


async def test_telling_twice_changes_nothing(kept):
    """An answer that was lost may be asked for again: figures are absolute."""
    tenant, limits = next(_names), TenantLimits(None, 1_000_000)
    account = Account(concurrent=1, requests=1, tokens=400_000, open_tokens=400_000)
    nothing = Account()
    for _ in range(3):
        await kept.store.exchange("one", [told(tenant, limits, account, known=nothing)], LEASE_S)
    ask = Ask(needed=1, wanted=10**6, dry_run=True)
    (verdicts,) = await kept.store.exchange(
        "one", [told(tenant, limits, account, [ask], nothing)], LEASE_S
    )
    # A second of this limit is 16,667 tokens.
    assert 600_000 <= verdicts[0].tokens < 700_000


async def test_a_charge_told_late_counts_no_more_than_the_teller_still_lacks(kept):
    """Ten minutes at the limit, untold, are not ten minutes of debt."""
    tenant, limits = next(_names), TenantLimits(None, 1000)
    account, nothing = Account(tokens=10_000), Account()
    late = Statement(tenant, limits, account, nothing, 0, 300, 1, [Ask(0, 0, 0, 1, 1000, True)])
    (verdicts,) = await kept.store.exchange("one", [late], LEASE_S)
    assert verdicts == [Verdict(700, left=700)]


async def test_a_statement_that_was_overtaken_is_not_heard(kept):
    """A frozen server reads what a connection that was given up has sent, after what came later."""
    tenant, limits = next(_names), TenantLimits(None, 6000, 1)
    held, nothing = Account(concurrent=1, tokens=500, open_tokens=500), Account()
    late = told(tenant, limits, held, known=nothing)
    await kept.store.exchange("one", [told(tenant, limits)], LEASE_S)
    assert await kept.store.exchange("one", [late], LEASE_S) == [[]]
    ask = Ask(concurrent=1, needed=6000, wanted=6000)
    (verdicts,) = await kept.store.exchange("two", [told(tenant, limits, asks=[ask])], LEASE_S)
    assert verdicts == [Verdict(6000)]


async def test_one_tenant_s_limits_are_no_other_s(kept):
    limits, ask = TenantLimits(1, 10, 1, 1), Ask(1, 1, 1, 10, 10)
    statements = [told(next(_names), limits, asks=[ask]) for _ in range(3)]
    verdicts = await kept.store.exchange("one", statements, LEASE_S)
    assert verdicts == [[Verdict(10)]] * 3


async def test_what_is_idle_vanishes_from_redis(shared_redis_server):
    """Each exchange sets the time to live, also of a name that has lost it."""
    tenant, limits = next(_names), TenantLimits(1, 10, 1, 1)
    key = limits_key(tenant)
    with shared_redis_server.client() as client:
        async with opened(shared_redis_server) as connection:
            store = RedisLimits(connection)
            for _ in range(2):
                await store.exchange("one", [told(tenant, limits)], LEASE_S)
                assert 119_000 < client.pttl(key) <= 120_000
                client.persist(key)


async def test_what_is_idle_vanishes_from_memory():
    now = 0.0
    store = MemoryLimits(lambda: now)
    await store.exchange("one", [told("a", TenantLimits(1))], 300)
    now = 299.9
    await store.exchange("one", [told("b", TenantLimits(1))], 1)
    assert len(store) == 2
    now = 301.0
    store.forget_idle()
    assert len(store) == 1


async def test_a_server_that_has_forgotten_the_script_is_told_it_again(shared_redis_server):
    tenant, limits = next(_names), TenantLimits(50)
    with shared_redis_server.client() as client:
        async with opened(shared_redis_server) as connection:
            store = RedisLimits(connection)
            for _ in range(2):
                for count in (1, 2):
                    client.script_flush()
                    statements = [told(tenant, limits, asks=[Ask(requests=1)])] * count
                    verdicts = await store.exchange(str(time.time()), statements, LEASE_S)
                    assert verdicts[0] == [Verdict()]
