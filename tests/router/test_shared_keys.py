"""Keys in Redis at running routers: made on one, they hold on all, streams included."""

import asyncio
import contextlib
import json
import time

import grpc
import pytest
import structlog
from prometheus_client import generate_latest

from noria.reasons import Reason
from noria.v1 import admin_pb2, admin_pb2_grpc
from router import key_cache
from router.first_key import make_first_key
from router.store.redis_news import News
from tests.router.fakes import EOS, bearer, events, failure, next_event, routed, until


class Admin:
    """An operator at one router."""

    def __init__(self, address, key):
        self._channel = grpc.aio.insecure_channel(address)
        self.stub = admin_pb2_grpc.AdminServiceStub(self._channel)
        self.metadata = bearer(key)

    async def call(self, method, request):
        return await getattr(self.stub, method)(request, metadata=self.metadata, timeout=10)

    async def tenant(self, name, **scope):
        request = admin_pb2.SetTenantRequest(name=name, scope=admin_pb2.TenantScope(**scope))
        await self.call("SetTenant", request)

    async def create(self, tenant, **more):
        return await self.call("CreateKey", admin_pb2.CreateKeyRequest(tenant=tenant, **more))

    async def revoke(self, key_id):
        return await self.call("RevokeKey", admin_pb2.RevokeKeyRequest(key_id=key_id))

    async def expire(self, key_id, **more):
        return await self.call("ExpireKey", admin_pb2.ExpireKeyRequest(key_id=key_id, **more))

    async def close(self):
        await self._channel.close()


@contextlib.asynccontextmanager
async def router_on(url, **more):
    settings = {"api_key_sha256": "", "redis_url": url, "redis_timeout_s": 5.0, **more}
    async with routed(**settings) as setup:
        setup.worker.auto = [10]
        yield setup


@contextlib.asynccontextmanager
async def administered(url, **more):
    """A router and its operator, and a tenant `t`."""
    key = await make_first_key(url, structlog.get_logger())
    async with router_on(url, **more) as setup:
        admin = Admin(setup.router.address, key)
        await admin.tenant("t")
        yield setup, admin
        await admin.close()


async def begun(setup, key):
    """A stream of which a first token has come."""
    setup.worker.auto = None
    call = setup.stream(key=key)
    count = len(setup.worker.submits) + 1
    submit = await setup.submitted(count)
    setup.worker.emit(submit.submit_number, 10)
    while not (await next_event(call)).HasField("content_block_delta"):
        pass
    return call, submit.submit_number


async def finished(setup, call, number):
    setup.worker.finish(number, "eos", EOS)
    return (await events(call))[-1].HasField("message_stop")


async def test_a_key_made_on_one_router_works_at_once_on_another(redis_url):
    async with administered(redis_url) as (_, admin), router_on(redis_url) as other:
        for _ in range(5):
            made = await admin.create("t")
            await events(other.stream(key=made.api_key))
            await admin.revoke(made.key.key_id)


async def test_a_rotation_is_seamless_and_its_streams_finish(redis_url):
    """Both keys work; the old one expires, its running stream ends as if it had not."""
    async with administered(redis_url) as (_, admin), router_on(redis_url) as other:
        old = await admin.create("t")
        call, number = await begun(other, old.api_key)
        new = await admin.create("t")
        await events_of(other, new.api_key)
        await admin.expire(old.key.key_id, expires_in_ms=0)
        await refused(other, old.api_key)
        assert await finished(other, call, number)


async def events_of(setup, key):
    setup.worker.auto = [10]
    await events(setup.stream(key=key))


async def refused(setup, key, within_s=2.0):
    """Seconds until a key is refused for good."""
    started = time.monotonic()
    setup.worker.auto = [10]
    while True:
        call = setup.stream(key=key)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await events(call)
        if await call.code() is grpc.StatusCode.UNAUTHENTICATED:
            return time.monotonic() - started
        assert time.monotonic() - started < within_s


@pytest.mark.parametrize("hears_of_it", [True, False], ids=["woken", "polling alone"])
async def test_a_revoked_key_and_its_streams_end_on_every_router_within_two_seconds(
    redis_url, hears_of_it, monkeypatch
):
    """With pub/sub at once; without it by the next look."""
    if not hears_of_it:
        monkeypatch.setattr(News, "publish", nothing)
    async with administered(redis_url) as (one, admin), router_on(redis_url) as other:
        made, kept = await admin.create("t"), await admin.create("t")
        ended = [(await begun(setup, made.api_key))[0] for setup in (one, other)]
        staying = await begun(other, kept.api_key)
        started = time.monotonic()
        await admin.revoke(made.key.key_id)
        for call in ended:
            code, error = await failure(call)
            assert (code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, Reason.KEY_REVOKED)
        assert time.monotonic() - started < 2.0
        await refused(other, made.api_key)
        assert await finished(other, *staying)


async def nothing(*args):
    """Nobody is told."""


async def test_a_changed_scope_holds_for_the_next_call(redis_url):
    async with administered(redis_url) as (_, admin), router_on(redis_url) as other:
        made = await admin.create("t")
        await events(other.stream(key=made.api_key))
        await admin.tenant("t", methods=admin_pb2.Names(names=["Chat"]))
        async with asyncio.timeout(2):
            while True:
                call = other.stream(key=made.api_key)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await events(call)
                if await call.code() is grpc.StatusCode.PERMISSION_DENIED:
                    break


async def test_while_redis_is_away_known_keys_serve_and_unknown_ones_are_told_to_wait(
    redis_server, monkeypatch
):
    """RDS-07: what is known to be void stays refused; a key that might be new is not called
    unknown. Back again, what was done meanwhile takes effect.
    """
    monkeypatch.setattr(key_cache, "POLL_S", 0.05)
    async with administered(redis_server.url) as (setup, admin):
        made, void = await admin.create("t"), await admin.create("t", expires_in_ms=0)
        streaming, number = await begun(setup, made.api_key)
        redis_server.kill()
        await events_of(setup, made.api_key)
        for key, code, reason in (
            ("unknown", grpc.StatusCode.UNAVAILABLE, Reason.STORE_UNAVAILABLE),
            (void.api_key, grpc.StatusCode.UNAUTHENTICATED, Reason.INVALID_KEY),
            ("", grpc.StatusCode.UNAVAILABLE, Reason.STORE_UNAVAILABLE),
        ):
            found, error = await failure(setup.stream(key=key))
            assert (found, error.reason) == (code, reason)
        assert gauge(setup) == 0
        code, error = await failure(admin.call("ListKeys", admin_pb2.ListKeysRequest()))
        assert error.reason is Reason.STORE_UNAVAILABLE
        redis_server.start()
        await until(lambda: gauge(setup) == 1)
        assert (await failure(setup.stream(key="unknown")))[1].reason is Reason.INVALID_KEY
        revoke_by_hand(redis_server, made.key.key_id)
        _, error = await failure(streaming)
        assert error.reason is Reason.KEY_REVOKED
        await until(lambda: number not in setup.worker.live)


def gauge(setup):
    lines = generate_latest(setup.router.metrics_registry).decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("noria_store_up "))


def revoke_by_hand(server, key_id):
    """As another router would, whose message this one does not get."""
    with server.client() as client:
        record = json.loads(client.hget("noria:{keys}:keys", key_id))
        client.hset("noria:{keys}:keys", key_id, json.dumps({**record, "revoked_ms": 1}))
        version = client.hincrby("noria:{keys}:meta", "version", 1)
        client.zadd("noria:{keys}:changed", {f"k:{key_id}": version})


async def test_a_redis_that_came_back_empty_voids_no_key_that_is_known(redis_server, monkeypatch):
    """Losing the keys is not the same as revoking all of them."""
    monkeypatch.setattr(key_cache, "POLL_S", 0.05)
    async with administered(redis_server.url) as (setup, admin):
        made = await admin.create("t")
        redis_server.kill()
        await until(lambda: gauge(setup) == 0)
        redis_server.forget()
        redis_server.start()
        await until(lambda: gauge(setup) == 1)
        # Asks the store, whatever it has told before.
        await failure(setup.stream(key="unknown"))
        await events_of(setup, made.api_key)
        found, error = await failure(setup.stream(key="unknown"))
        assert (found, error.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.STORE_UNAVAILABLE)
        _, error = await failure(admin.call("SetTenant", admin_pb2.SetTenantRequest(name="new")))
        assert error.reason is Reason.STORE_UNAVAILABLE
        assert await make_first_key(redis_server.url, structlog.get_logger()) is not None
        await refused(setup, made.api_key)


async def test_keys_are_known_for_no_longer_than_was_said(redis_server, monkeypatch):
    monkeypatch.setattr(key_cache, "POLL_S", 0.05)
    async with administered(redis_server.url, keys_max_age_s=1.0) as (setup, admin):
        made = await admin.create("t")
        await events(setup.stream(key=made.api_key))
        redis_server.kill()
        await until(lambda: not setup.router._keys.is_usable)
        found, error = await failure(setup.stream(key=made.api_key))
        assert (found, error.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.STORE_UNAVAILABLE)


async def test_a_router_that_starts_without_redis_is_ready_once_it_has_read_the_keys(
    redis_server, monkeypatch
):
    monkeypatch.setattr(key_cache, "POLL_S", 0.05)
    key = await make_first_key(redis_server.url, structlog.get_logger())
    redis_server.kill()
    async with router_on(redis_server.url, ready=False) as setup:
        await until(lambda: any(map(setup.router.registry.understands, setup.router.registry)))
        found, error = await failure(setup.stream(key=key))
        assert (found, error.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.STORE_UNAVAILABLE)
        assert not setup.router._ready.is_set()
        redis_server.start()
        await asyncio.wait_for(setup.router.wait_ready(), 10)
        await events(setup.stream(key=key))


async def test_nothing_in_redis_tells_a_key_or_what_was_said(redis_server):
    """SEC-02, SEC-07: digests of keys, and names."""
    async with administered(redis_server.url) as (setup, admin):
        made = await admin.create("t", label="ci")
        await events(setup.stream("PROMPTMARK", key=made.api_key))
        listed = await admin.call("ListKeys", admin_pb2.ListKeysRequest())
        everything = redis_server.everything()
    assert made.key.key_id in everything
    for secret in (made.api_key, made.api_key.removeprefix("noria-"), "PROMPTMARK"):
        assert secret not in everything
        assert secret not in str(listed)
    outside = [line[:80] for line in everything.splitlines() if not line.startswith("noria:")]
    assert outside == []
