"""What a router knows of keys: never older than it may be, and asked for no more than needed."""

import asyncio
import hashlib

import pytest
import structlog

from noria.reasons import Reason, RequestError
from router.auth import Tenant
from router.key_cache import KeyCache
from router.store.base import StoreUnavailableError
from router.store.keys import KeyNews, KeyRecord, Mark, key_id_of
from tests.router.fakes import FakeClock


class GatedStore:
    """Answers each question when it is let, with what it knows at that moment."""

    def __init__(self):
        self.keys = {}
        self.version = 0
        self.asked = 0
        self.away = False
        self.gate = asyncio.Event()
        self.gate.set()

    def put(self, text, *, tenant="t", **more):
        digest = hashlib.sha256(text.encode()).hexdigest()
        record = KeyRecord(key_id_of(digest), digest, tenant, **more)
        self.keys[record.key_id] = record
        self.version += 1
        return record.key_id

    async def news(self, since):
        self.asked += 1
        known, version = dict(self.keys), self.version
        await self.gate.wait()
        if self.away:
            raise StoreUnavailableError("away")
        return KeyNews(Mark("e", version), True, {"t": Tenant("t")}, known)


class Case:
    def __init__(self, *, patience_s=5.0):
        self.store, self.clock = GatedStore(), FakeClock()
        self.revoked, self.changes = [], 0
        self.cache = KeyCache(
            self.store,
            max_age_s=60.0,
            patience_s=patience_s,
            on_revoked=lambda ids: self.revoked.append(ids),
            on_change=self._changed,
            clock=self.clock,
            log=structlog.get_logger(),
            wall_clock=self.clock,
        )

    def _changed(self):
        self.changes += 1

    async def ask(self, key):
        try:
            return (await self.cache.authenticate([("x-api-key", key)])).key_id
        except RequestError as error:
            return error.reason


@pytest.fixture
def case():
    return Case()


async def test_a_known_key_asks_nobody(case):
    key_id = case.store.put("known")
    await case.cache.refresh()
    assert [await case.ask("known") for _ in range(100)] == [key_id] * 100
    assert case.store.asked == 1


async def test_any_number_of_unknown_keys_at_once_are_one_question(case):
    """And a second one for those that came after the first was put."""
    await case.cache.refresh()
    case.store.gate.clear()
    asking = [asyncio.create_task(case.ask(f"unknown {n}")) for n in range(100)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = case.store.put("late")
    asking.append(asyncio.create_task(case.ask("late")))
    await asyncio.sleep(0)
    case.store.gate.set()
    assert await asyncio.gather(*asking) == [Reason.INVALID_KEY] * 100 + [late]
    assert case.store.asked <= 4


async def test_a_key_made_while_the_store_was_being_read_is_not_taken_for_unknown(case):
    case.store.gate.clear()
    reading = asyncio.create_task(case.cache.refresh())
    await asyncio.sleep(0)
    made = case.store.put("made")
    asking = asyncio.create_task(case.ask("made"))
    await asyncio.sleep(0)
    case.store.gate.set()
    assert await asking == made
    await reading


async def test_whoever_waits_is_told_in_time_when_the_store_is_slow():
    """RDS-07; one who is cancelled takes the question along, and the next one asks again."""
    case = Case(patience_s=0.02)
    known = case.store.put("known")
    await case.cache.refresh()
    case.store.gate.clear()
    asking = [case.ask("unknown") for _ in range(20)]
    assert set(await asyncio.gather(*asking)) == {Reason.STORE_UNAVAILABLE}
    assert await case.ask("known") == known
    case.store.gate.set()
    assert await case.ask("unknown") is Reason.INVALID_KEY


async def test_while_the_store_is_away_only_what_is_known_is_judged(case):
    known = case.store.put("known")
    case.store.put("revoked", revoked_at=1.0)
    case.store.put("expired", expires_at=case.clock.now)
    await case.cache.refresh()
    case.store.away = True
    answers = {key: await case.ask(key) for key in ("known", "revoked", "expired", "unknown")}
    assert answers == {
        "known": known,
        "revoked": Reason.INVALID_KEY,
        "expired": Reason.INVALID_KEY,
        "unknown": Reason.STORE_UNAVAILABLE,
    }
    case.clock.now += 60.1
    assert not case.cache.is_usable
    assert await case.ask("known") is Reason.STORE_UNAVAILABLE
    case.store.away = False
    assert await case.ask("known") == known


async def test_a_revocation_is_told_once_and_that_of_a_forgotten_key_too(case):
    ids = [case.store.put(text) for text in ("a", "b", "expired", "file")]
    case.store.put("expired", expires_at=case.clock.now - 1)
    case.store.put("file", is_fixed=True)
    await case.cache.refresh()
    case.store.put("a", revoked_at=1.0)
    for _ in range(3):
        await case.cache.refresh()
    assert case.revoked == [{ids[0]}]
    for key_id in ids[1:]:
        del case.store.keys[key_id]
    case.store.version += 1
    await case.cache.refresh()
    assert case.revoked == [{ids[0]}, {ids[1]}]


async def test_it_says_when_it_has_become_usable(case):
    case.store.away = True
    with pytest.raises(StoreUnavailableError):
        await case.cache.refresh()
    assert (case.cache.is_usable, case.changes) == (False, 0)
    case.store.away = False
    await case.cache.refresh()
    assert (case.cache.is_usable, case.changes) == (True, 1)
    await case.cache.refresh()
    assert case.changes == 1


async def test_a_key_whose_tenant_is_not_known_is_no_key(case):
    case.store.put("orphan", tenant="nobody")
    assert await case.ask("orphan") is Reason.INVALID_KEY
