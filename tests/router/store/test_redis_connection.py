"""What calls to Redis come to while it is away, slow, full, or forgetful: never more than told."""

import asyncio
import ssl
import time
from urllib.parse import quote

import pytest
import structlog
import trustme
from redis.exceptions import RedisError

from router.store.base import StoreUnavailableError
from router.store.redis_connection import Script, redis_connection
from tests.support.redis_server import running_redis
from tests.support.slow_line import slow_line
from tests.support.waiting import until

ECHO = Script("return {KEYS[1], ARGV[1]}")


@pytest.fixture
async def connection(redis_server):
    """One that is patient: what else runs here may take long."""
    async with redis_connection(redis_server.url, structlog.get_logger(), timeout_s=5) as made:
        yield made


async def refused(connection):
    """How long a call took that the store did not answer."""
    started = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        await connection.call(lambda client: client.get("noria:x"))
    return time.monotonic() - started


async def test_a_server_that_dies_is_told_once_and_its_return_once(redis_server):
    with structlog.testing.capture_logs() as lines:
        async with redis_connection(redis_server.url, structlog.get_logger()) as connection:
            assert connection.available
            redis_server.kill()
            await refused(connection)
            assert not connection.available
            await until(lambda: any(line["event"] == "store_down" for line in lines))
            redis_server.start()
            await connection.wait_available()
            assert await connection.call(lambda client: client.get("noria:x")) is None
    told = [line["event"] for line in lines if line["event"] != "store_call_failed"]
    assert told[0] == "store_up"
    assert told[-1] == "store_back"
    assert set(told[1:-1]) == {"store_down"}


async def test_while_it_is_away_calls_take_no_time(redis_server, connection):
    redis_server.kill()
    await refused(connection)
    times = [await refused(connection) for _ in range(100)]
    assert sum(times) < 0.05


async def test_a_server_that_hangs_costs_each_call_a_tenth_of_a_second_at_most(redis_server):
    """RDS-07, and all calls under way together no longer than one."""
    async with redis_connection(redis_server.url, structlog.get_logger()) as connection:
        redis_server.freeze()
        times = await asyncio.gather(*(refused(connection) for _ in range(100)))
        assert max(times) < 1.0
        assert await refused(connection) < 0.05
        redis_server.thaw()
        await asyncio.wait_for(connection.wait_available(), 10)


async def test_a_connection_begins_while_the_server_is_away(redis_server):
    redis_server.kill()
    async with redis_connection(redis_server.url, structlog.get_logger()) as connection:
        assert not connection.available
        redis_server.start()
        await asyncio.wait_for(connection.wait_available(), 10)


@pytest.mark.parametrize(
    "fault",
    [("config", "set", "maxmemory", "1"), ("replicaof", "127.0.0.1", "1")],
    ids=["full", "read-only"],
)
async def test_a_server_that_takes_no_writes_is_away(redis_server, connection, fault):
    """RDS-07: it answers pings all the same."""
    with redis_server.client() as client:
        client.execute_command(*fault)
    with pytest.raises(StoreUnavailableError):
        await connection.call(lambda client: client.set("noria:x", 1))
    await until(lambda: not connection.available)


async def test_a_command_that_redis_refuses_is_no_error_of_the_callers_kind(
    redis_server, connection
):
    """A value of another type was put there by hand: told by Redis's word, the store stays."""
    with redis_server.client() as client:
        client.set("noria:x", "text")
    with structlog.testing.capture_logs() as lines, pytest.raises(StoreUnavailableError) as caught:
        await connection.call(lambda client: client.zcard("noria:x"))
    assert not isinstance(caught.value, RedisError)
    assert [line.get("kind") for line in lines] == ["ResponseError WRONGTYPE"]
    assert connection.available


async def test_a_script_that_the_server_forgot_is_told_again(redis_server, connection):
    assert await connection.evaluate(ECHO, ["noria:k"], [1]) == ["noria:k", "1"]
    with redis_server.client() as client:
        client.script_flush()
    assert await connection.evaluate(ECHO, ["noria:k"], ["two"]) == ["noria:k", "two"]


async def test_a_cancelled_call_leaves_no_reply_for_the_next_one(redis_server, connection):
    """RDS-02: each answer is the one to its own question, however many calls are cancelled."""
    with redis_server.client() as client:
        for number in range(50):
            client.set(f"noria:{number}", number)

    async def read(number, patience_s=None):
        call = connection.call(lambda client: client.get(f"noria:{number}"))
        if patience_s is None:
            return await call == str(number)
        task = asyncio.create_task(call)
        await asyncio.sleep(patience_s)
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled() or task.result() == str(number)

    for round_number in range(10):
        patience = [None if i % 2 else (i + round_number) * 2e-5 for i in range(50)]
        results = await asyncio.gather(*map(read, range(50), patience))
        assert all(results)


async def test_neither_password_nor_address_is_told(tmp_path):
    """SEC-07."""
    with running_redis(tmp_path, password="PASSMARK91") as server:
        with structlog.testing.capture_logs() as lines:
            async with redis_connection(server.url, structlog.get_logger()) as connection:
                with server.client() as client:
                    client.config_set("requirepass", "PASSMARK92")
                await connection.client.connection_pool.disconnect()
                await refused(connection)
                await until(lambda: not connection.available)
        assert "store_down" in [line["event"] for line in lines]
        assert "PASSMARK" not in str(lines)
        assert str(server.port) not in str(lines)


async def test_with_tls_the_server_has_to_be_who_its_certificate_says(redis_server, tmp_path):
    authority, other = trustme.CA(), trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    found = {}
    async with slow_line(redis_server.port, tls) as line:
        for name, ca in (("its own", authority), ("another", other)):
            path = tmp_path / f"{name}.pem"
            ca.cert_pem.write_to_path(path)
            url = f"rediss://127.0.0.1:{line.port}/0?ssl_ca_certs={quote(str(path))}"
            async with redis_connection(url, structlog.get_logger(), timeout_s=5) as connection:
                found[name] = connection.available
    assert found == {"its own": True, "another": False}


async def test_a_unix_socket_serves_as_well(tmp_path):
    path = tmp_path / "socket"
    with running_redis(tmp_path, flags=("--unixsocket", str(path))):
        async with redis_connection(f"unix://{path}", structlog.get_logger()) as connection:
            assert connection.available


@pytest.mark.parametrize(
    "url", ["nonsense-PASSMARK", "http://:PASSMARK@h", "redis://h?odd=PASSMARK"]
)
async def test_a_url_that_cannot_be_used_is_refused_without_being_repeated(url):
    with pytest.raises(ValueError, match="redis-url") as caught:
        async with redis_connection(url, structlog.get_logger()):
            pass
    assert "PASSMARK" not in f"{caught.value!r} {caught.value.__cause__!r}"
