"""Whatever is asked of them in whichever order, memory and Redis answer and keep the same."""

import asyncio
import hashlib

import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noria.reasons import RequestError
from router.auth import Tenant
from router.store.keys import NewKey, key_id_of
from router.store.memory_keys import MemoryKeys
from router.store.opened import open_store

NAMES = ("a", "b")
DIGESTS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(6)]
# Far enough from now that no clock decides which of two is first.
ENDS = st.sampled_from([None, 0, 3600])
tenants = st.builds(
    Tenant, st.sampled_from(NAMES), models=st.sampled_from([None, frozenset(), frozenset("xy")]),
    admin=st.booleans(),
)  # fmt: skip
digests = st.sampled_from(DIGESTS)
new_keys = st.builds(NewKey, st.sampled_from(NAMES), digests, st.just("l"), ENDS)
steps = st.one_of(
    st.tuples(st.just("set_tenant"), tenants),
    st.tuples(st.just("create"), new_keys),
    st.tuples(st.just("create_first"), tenants.filter(lambda each: each.admin), digests),
    st.tuples(st.just("revoke"), digests.map(key_id_of)),
    st.tuples(st.just("expire"), digests.map(key_id_of), ENDS),
)


async def done(store, step):
    """What a step comes to, without its time."""
    name, *args = step
    try:
        if name == "create_first":
            tenant, digest = args
            made = await store.create_first(tenant, NewKey(tenant.name, digest))
            return made and plain(made[0])
        result = await getattr(store, name)(*args, "by")
    except RequestError as error:
        return error.reason, error.message
    return result.action if name == "set_tenant" else (plain(result[0]), result[1] is None)


def plain(record):
    return (
        record.key_id, record.tenant, record.label, record.revoked_at is None,
        record.expires_at is None, record.is_live(record.created_at + 1),
    )  # fmt: skip


async def kept(store, since):
    news = await store.news(since)
    keys = {key_id: record and plain(record) for key_id, record in news.keys.items()}
    account = [(each.by, each.action, each.tenant, each.key_id) for each in
               await store.key_changes(100)]  # fmt: skip
    return news.mark, dict(news.tenants), keys, account


async def compare(url, taken):
    memory = MemoryKeys()
    async with open_store(url, structlog.get_logger(), timeout_s=5) as store:
        seen, known = None, ({}, {})
        for step in taken:
            assert await done(memory, step) == await done(store.keys, step)
            # Redis tells what has changed: put together it is what there is.
            seen, tenants_now, keys_now, _ = await kept(store.keys, seen)
            known = ({**known[0], **tenants_now}, {**known[1], **keys_now})
        _, *whole = await kept(store.keys, None)
        _, *other = await kept(memory, None)
        assert whole == other
        assert known == tuple(whole[:2])


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(taken=st.lists(steps, max_size=25))
def test_any_steps_come_to_the_same(shared_redis_server, taken):
    with shared_redis_server.client() as client:
        client.flushall()
    asyncio.run(compare(shared_redis_server.url, taken))
