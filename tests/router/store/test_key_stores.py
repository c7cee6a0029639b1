"""Keys and tenants: the same in memory and in Redis."""

import asyncio
import hashlib

import pytest
import structlog

from noria.reasons import Reason, RequestError
from router.auth import Tenant
from router.store.keys import MAX_VOID_KEYS, NewKey, key_id_of
from router.store.opened import open_store
from router.tenant_limits import TenantLimits

SCOPED = Tenant(
    "search",
    models=frozenset({"chat", "b"}),
    methods=frozenset(),
    priority_ceiling=-3,
    cache_group="g",
    limits=TenantLimits(requests_per_minute=6, queue_share=0.25),
)


@pytest.fixture(params=["memory", "redis"])
async def keys(request):
    url = request.getfixturevalue("redis_url") if request.param == "redis" else ""
    async with open_store(url, structlog.get_logger(), timeout_s=5) as store:
        yield store.keys


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def new(tenant, text, **more):
    return NewKey(tenant, digest(text), **more)


async def refusal(awaitable):
    with pytest.raises(RequestError) as caught:
        await awaitable
    return caught.value


async def live(keys, tenant):
    known = (await keys.news(None)).keys.values()
    return {key.label for key in known if key.tenant == tenant and key.is_live(key.created_at)}


async def test_a_tenant_and_its_keys_are_given_back_as_they_were_made(keys):
    await keys.set_tenant(SCOPED, "key-admin")
    made, change = await keys.create(new("search", "one", label='a "b"', expires_in_s=60), "x")
    news = await keys.news(None)
    assert news.is_whole
    assert news.tenants == {"search": SCOPED}
    assert news.keys == {made.key_id: made}
    assert (made.sha256, made.label, made.tenant) == (digest("one"), 'a "b"', "search")
    assert made.key_id == key_id_of(digest("one"))
    assert made.expires_at == pytest.approx(made.created_at + 60, abs=0.002)
    assert (change.by, change.action, change.key_id) == ("x", "create", made.key_id)


async def test_what_changed_since_is_told_and_nothing_when_nothing_has(keys):
    await keys.set_tenant(SCOPED, "")
    made, _ = await keys.create(new("search", "one"), "")
    seen = (await keys.news(None)).mark
    nothing = await keys.news(seen)
    assert (nothing.mark, nothing.tenants, nothing.keys) == (seen, {}, {})
    await keys.revoke(made.key_id, "")
    await keys.set_tenant(Tenant("other"), "")
    news = await keys.news(seen)
    assert news.keys[made.key_id].revoked_at is not None
    assert news.tenants["other"] == Tenant("other")
    assert news.mark != seen


async def test_a_third_live_key_is_refused_by_name_until_one_of_them_ends(keys):
    await keys.set_tenant(Tenant("t"), "")
    made = [(await keys.create(new("t", text), ""))[0] for text in ("one", "two")]
    error = await refusal(keys.create(new("t", "three"), ""))
    assert error.reason is Reason.TOO_MANY_KEYS
    assert all(key.key_id in error.message for key in made)
    await keys.expire(made[0].key_id, 0, "")
    await keys.create(new("t", "three"), "")
    assert (await refusal(keys.create(new("t", "four"), ""))).reason is Reason.TOO_MANY_KEYS
    await keys.revoke(made[1].key_id, "")
    await keys.create(new("t", "four"), "")


async def test_of_many_keys_made_at_once_two_live(keys):
    await keys.set_tenant(Tenant("t"), "")
    tries = [keys.create(new("t", str(number)), "") for number in range(10)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(result, tuple) for result in results) == 2


async def test_an_expired_key_does_not_come_to_life_beside_two_others(keys):
    await keys.set_tenant(Tenant("t"), "")
    old, _ = await keys.create(new("t", "old", expires_in_s=0), "")
    for text in ("one", "two"):
        await keys.create(new("t", text), "")
    assert (await refusal(keys.expire(old.key_id, None, ""))).reason is Reason.TOO_MANY_KEYS
    assert (await refusal(keys.expire(old.key_id, 60, ""))).reason is Reason.TOO_MANY_KEYS
    await keys.expire(old.key_id, 0, "")


async def test_revoking_is_for_good_and_may_be_repeated(keys):
    await keys.set_tenant(Tenant("t"), "")
    made, _ = await keys.create(new("t", "one"), "")
    revoked, change = await keys.revoke(made.key_id, "x")
    assert (change.action, change.tenant) == ("revoke", "t")
    assert await keys.revoke(made.key_id, "x") == (revoked, None)
    assert await keys.expire(made.key_id, None, "x") == (revoked, None)
    assert revoked.revoked_at is not None


async def test_an_expiry_may_be_moved_and_taken_back(keys):
    await keys.set_tenant(Tenant("t"), "")
    made, _ = await keys.create(new("t", "one", expires_in_s=5), "")
    later, _ = await keys.expire(made.key_id, 600, "")
    assert later.expires_at > made.expires_at
    never, _ = await keys.expire(made.key_id, None, "")
    assert never.expires_at is None


async def test_unknown_ids_tenants_and_doubles_are_refused(keys):
    for call in (keys.revoke("key-none", ""), keys.expire("key-none", 1, "")):
        assert (await refusal(call)).reason is Reason.KEY_NOT_FOUND
    error = await refusal(keys.create(new("nobody", "one"), ""))
    assert (error.reason, error.fields[0][0]) == (Reason.INVALID_FIELD, "tenant")
    await keys.set_tenant(Tenant("t"), "")
    await keys.create(new("t", "one"), "")
    assert (await refusal(keys.create(new("t", "one"), ""))).reason is Reason.INVALID_FIELD


async def test_a_first_administrator_is_made_once_however_many_ask(keys):
    admin = Tenant("admin", admin=True)
    tries = [keys.create_first(admin, new("admin", str(number))) for number in range(5)]
    made = [result for result in await asyncio.gather(*tries) if result is not None]
    assert len(made) == 1
    (key, change) = made[0]
    assert (change.by, change.action) == ("", "init")
    assert (await keys.news(None)).tenants["admin"].admin
    await keys.revoke(key.key_id, "")
    assert await keys.create_first(admin, new("admin", "again")) is not None


async def test_void_keys_are_remembered_up_to_a_number(keys):
    """The oldest of them are forgotten, and that is told as well."""
    await keys.set_tenant(Tenant("t"), "")
    first, _ = await keys.create(new("t", "first", expires_in_s=0), "")
    seen = (await keys.news(None)).mark
    for number in range(MAX_VOID_KEYS + 2):
        await keys.create(new("t", str(number), expires_in_s=0), "")
    news = await keys.news(seen)
    assert len((await keys.news(None)).keys) == MAX_VOID_KEYS + 1
    assert news.is_whole or news.keys[first.key_id] is None


async def test_every_change_is_in_the_account(keys):
    await keys.set_tenant(Tenant("t"), "a")
    made, _ = await keys.create(new("t", "one"), "b")
    await keys.expire(made.key_id, 60, "c")
    await keys.revoke(made.key_id, "d")
    await keys.revoke(made.key_id, "e")
    told = [(each.by, each.action, each.tenant) for each in await keys.key_changes(10)]
    assert told == [
        ("d", "revoke", "t"), ("c", "expire", "t"), ("b", "create", "t"), ("a", "set_tenant", "t"),
    ]  # fmt: skip
    assert [each.by for each in await keys.key_changes(1)] == ["d"]
