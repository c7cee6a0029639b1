"""Who is refused learns nothing by it: neither from what is said, nor from when, nor where."""

import asyncio
import contextlib
import hashlib
import json
import struct
import time

import grpc
import pytest
import structlog
from prometheus_client import generate_latest

from noria.reasons import Reason, RequestError
from noria.v1 import admin_pb2, chat_pb2
from router import key_cache
from router.auth import ApiKey, KeyRing, Tenant
from router.first_key import make_first_key
from router.store.keys import NewKey
from router.store.opened import open_store
from router.store.redis_news import News
from tests.router.fakes import bearer, events, failure, routed, until
from tests.router.test_shared_keys import administered, nothing, router_on
from tests.support.redis_server import running_redis
from tests.support.slow_line import slow_line

ODD = {
    "none": (),
    "empty": (("x-api-key", ""),),
    "empty bearer": (("authorization", "Bearer "),),
    "unknown": (("x-api-key", "noria-unknown"),),
    "huge": (("x-api-key", "x" * 8_000),),
    "another scheme": (("authorization", "Basic bm9yaWE6bm9yaWE="),),
    "a digest": (("x-api-key", "0" * 64),),
    "twice the same header": (("authorization", "Bearer a"), ("authorization", "Bearer b")),
    "both headers, different": (("authorization", "Bearer a"), ("x-api-key", "b")),
}


async def test_every_odd_key_is_refused_alike(redis_url):
    """SEC-01: with a store behind it; a revoked and an expired key too."""
    async with administered(redis_url) as (setup, admin):
        revoked, expired = await admin.create("t"), await admin.create("t", expires_in_ms=0)
        await admin.revoke(revoked.key.key_id)
        presented = [*ODD.values(), bearer(revoked.api_key), bearer(expired.api_key)]
        answers = set()
        for metadata in presented:
            request = chat_pb2.ListModelsRequest()
            code, error = await failure(setup.stub.ListModels(request, metadata=metadata))
            answers.add((code, error.reason, error.message, error.fields, error.retry_after_s))
        assert len(answers) == 1
        assert answers.pop()[:2] == (grpc.StatusCode.UNAUTHENTICATED, Reason.INVALID_KEY)


@pytest.mark.parametrize(
    "value", [b"Bearer caf\xe9", "Bearer \u201cquoted\u201d".encode(), b"Bearer \xff\xfe", b"\x80"]
)
async def test_bytes_that_no_client_library_sends_are_refused_too(redis_url, value):
    """SEC-01: the router goes on; nothing but that it refused is told."""
    with structlog.testing.capture_logs() as lines:
        async with administered(redis_url) as (setup, admin):
            host, port = setup.router.address.split(":")
            answer = await sent_raw(host, int(port), b"authorization", value)
            assert b"the API key is missing, unknown or malformed" in answer
            made = await admin.create("t")
            await events(setup.stream(key=made.api_key))
    events_told = [line["event"] for line in lines]
    assert "lookup_refused" in events_told
    assert "defect" not in events_told
    assert "loop_ended" not in events_told


async def sent_raw(host, port, name, value):
    """One ListModels call in HTTP/2 as it stands on the line; its answer's headers."""
    reader, writer = await asyncio.open_connection(host, port)
    path = b"/noria.v1.ChatService/ListModels"
    headers = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"),
        (b"te", b"trailers"), (b"content-type", b"application/grpc"), (name, value),
    ]  # fmt: skip
    block = b"".join(b"\x00" + _string(n) + _string(v) for n, v in headers)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
    writer.write(_frame(1, 0x4, 1, block) + _frame(0, 0x1, 1, b"\0" * 5))
    await writer.drain()
    stream = 0
    async with asyncio.timeout(5):
        while stream != 1:
            _, answer, stream = await _frame_of(reader)
    writer.close()
    return answer


def _string(text):
    # RFC 7541, 5.2: not Huffman coded, up to 126 bytes.
    assert len(text) < 127
    return bytes([len(text)]) + text


def _frame(kind, flags, stream, payload):
    # RFC 9113, 4.1.
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


async def _frame_of(reader):
    head = await reader.readexactly(9)
    size = int.from_bytes(head[:3], "big")
    return head[3], await reader.readexactly(size), int.from_bytes(head[5:], "big")


def test_how_long_a_refusal_takes_does_not_tell_how_much_of_a_key_was_right():
    """SEC-02: keys that differ early, late, or are void, against each other in turn: the median
    of the ratios of their CPU times is one.
    """
    key = "noria-" + "k" * 43
    digests = {text: hashlib.sha256(text.encode()).hexdigest() for text in (key, key + "void")}
    ring = KeyRing(
        {digests[key]: ApiKey(Tenant("t")), digests[key + "void"]: ApiKey(Tenant("t"), 0.0)}
    )
    presented = {
        "first byte": "X" + key[1:], "last byte": key[:-1] + "X", "prefix": key[:-4] + "XXXX",
        "void": key + "void",
    }  # fmt: skip
    rounds = [
        {name: refusals_s(ring, text) for name, text in presented.items()} for _ in range(201)
    ]
    for name in presented:
        ratios = sorted(each[name] / each["first byte"] for each in rounds)
        assert ratios[100] == pytest.approx(1.0, abs=0.1), name


def refusals_s(ring, key):
    """CPU seconds of some refusals."""
    metadata = (("x-api-key", key),)
    started = time.thread_time_ns()
    for _ in range(20):
        with contextlib.suppress(RequestError):
            ring.authenticate(metadata)
    return (time.thread_time_ns() - started) / 1e9


async def test_nothing_but_health_and_reflection_answers_without_a_key():
    """SEC-03: every method of every service, by the list that reflection gives."""
    async with routed() as setup, grpc.aio.insecure_channel(setup.router.address) as channel:
        services = [
            file.services_by_name[name]
            for file in (chat_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
            for name in file.services_by_name
        ]
        paths = [f"/{s.full_name}/{m.name}" for s in services for m in s.methods]
        assert len(paths) > 15
        for path in paths:
            call = channel.unary_stream(path)(b"")
            code, error = await failure(call)
            assert (path, code) == (path, grpc.StatusCode.UNAUTHENTICATED)
            assert error.reason is Reason.INVALID_KEY
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await health(b"") == b"\x08\x01"
        for odd in ("/noria.v1.chatservice/Chat", "//noria.v1.ChatService/Chat", "/x/y"):
            code, _ = await failure(channel.unary_unary(odd)(b""))
            assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_neither_keys_nor_the_password_of_redis_are_told_anywhere(tmp_path):
    """SEC-07: served, refused, revoked, while Redis is away, and with another password."""
    with (
        running_redis(tmp_path, password="PASSMARK91") as server,
        server.client() as operator,
        structlog.testing.capture_logs() as lines,
    ):
        # It was let in before, and stays so.
        operator.ping()
        async with administered(server.url) as (setup, admin):
            made = await admin.create("t")
            await events(setup.stream(key=made.api_key))
            await failure(setup.stream(key="noria-wrong"))
            operator.config_set("requirepass", "other")
            operator.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await until(lambda: not setup.router.state().store_up)
            await failure(setup.stream(key="noria-wrong"))
            _, error = await failure(admin.call("ListKeys", admin_pb2.ListKeysRequest()))
            operator.config_set("requirepass", "PASSMARK91")
            await until(lambda: setup.router.state().store_up)
            await admin.revoke(made.key.key_id)
            metrics = generate_latest(setup.router.metrics_registry).decode()
    told = json.dumps(lines, default=str) + metrics + str(error) + server_content(tmp_path)
    for secret in ("PASSMARK91", made.api_key, made.api_key[6:], "noria-wrong"):
        assert secret not in told
    assert hashlib.sha256(made.api_key.encode()).hexdigest() not in json.dumps(lines, default=str)


def server_content(folder):
    """What the server has written down, as far as it is text; its own log is not ours."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "log"]
    return "".join(path.read_bytes().decode("latin-1") for path in files)


async def test_no_answer_is_ever_another_tenants(redis_server, monkeypatch):
    """RDS-02: each key is looked up in the moment in which it is first used, behind a slow
    line, while the calls of others are cancelled in the middle of that.
    """
    monkeypatch.setattr(key_cache, "POLL_S", 60.0)
    monkeypatch.setattr(News, "publish", nothing)
    async with (
        slow_line(redis_server.port) as line,
        router_on(f"redis://127.0.0.1:{line.port}/0") as setup,
        open_store(redis_server.url, structlog.get_logger(), timeout_s=5) as store,
    ):
        line.delay_s = 0.005
        results = await asyncio.gather(*(asked(setup, store, number) for number in range(60)))
    assert set(results) == {"right", "cancelled"}
    assert results.count("cancelled") >= 5


async def asked(setup, store, number):
    """What became of a call by a new tenant; every other one may use no model."""
    name, key, has_models = f"t{number}", f"noria-{number}", bool(number % 2)
    await store.keys.set_tenant(Tenant(name, models=None if has_models else frozenset()), "")
    await store.keys.create(NewKey(name, hashlib.sha256(key.encode()).hexdigest()), "")
    call = setup.stub.ListModels(chat_pb2.ListModelsRequest(), metadata=bearer(key))
    if number % 3 == 0:
        await asyncio.sleep(number * 3e-4)
        if call.cancel():
            return "cancelled"
    return "right" if bool((await call).models) == has_models else "wrong"


async def test_a_slow_redis_costs_a_request_a_tenth_of_a_second_at_most(redis_server):
    """RDS-07: one that answers after two seconds; known keys do not wait for it at all."""
    async with slow_line(redis_server.port) as line:
        url = f"redis://127.0.0.1:{line.port}/0"
        key = await make_first_key(url, structlog.get_logger())
        async with router_on(url, redis_timeout_s=0.1) as setup:
            await events(setup.stream(key=key))
            line.delay_s = 2.0
            for _ in range(5):
                started = time.monotonic()
                call = setup.stub.ListModels(chat_pb2.ListModelsRequest(), metadata=bearer(key))
                assert len((await call).models) == 1
                known_s, started = time.monotonic() - started, time.monotonic()
                code, _ = await failure(setup.stream(key="noria-unknown"))
                assert code is grpc.StatusCode.UNAVAILABLE
                # Twice asked, by the guard and by the call; the rest is for slow computers.
                assert (known_s, time.monotonic() - started) < (0.1, 1.0)
            line.delay_s = 0.0


async def test_streams_under_load_do_not_notice_what_happens_to_redis(redis_server):
    """Killed, started, frozen and thawed: every request is served."""
    async with administered(redis_server.url, redis_timeout_s=0.1) as (setup, admin):
        made = await admin.create("t")
        served, stop = 0, asyncio.Event()

        async def load():
            nonlocal served
            while not stop.is_set():
                await events(setup.stream(key=made.api_key))
                served += 1

        loads = [asyncio.create_task(load()) for _ in range(4)]
        for act in (
            redis_server.kill, redis_server.start, redis_server.freeze, redis_server.thaw,
        ):  # fmt: skip
            await until(lambda before=served: served > before + 20)
            act()
        await until(lambda before=served: served > before + 20)
        await until(lambda: setup.router.state().store_up)
        stop.set()
        await asyncio.gather(*loads)
