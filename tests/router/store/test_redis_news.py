"""Subscriptions come back after whatever happened to their connection, and say so."""

import asyncio
import contextlib

import pytest
import structlog

from noria.service.tasks import keep_running
from router.connection import background
from router.store.base import StoreUnavailableError
from router.store.redis_connection import redis_connection
from router.store.redis_news import News
from tests.support.waiting import until


@contextlib.asynccontextmanager
async def listening(url):
    heard = []
    async with redis_connection(url, structlog.get_logger(), timeout_s=1) as connection:
        news = News(connection)
        news.listen("noria:one", lambda message: heard.append(("one", message)))
        news.listen("noria:two", lambda message: heard.append(("two", message)))
        async with background([keep_running(news.run, lambda error: None)]):
            await until(lambda: len(heard) == 2)
            assert sorted(heard) == [("one", ""), ("two", "")]
            heard.clear()
            yield news, heard


async def test_each_listener_hears_its_own_channel(redis_server):
    async with listening(redis_server.url) as (news, heard):
        await news.publish("noria:one", "x")
        await news.publish("noria:two", "y")
        await until(lambda: len(heard) == 2)
        assert heard == [("one", "x"), ("two", "y")]


def restarted(server):
    server.kill()
    server.start()


def cut(server):
    with server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")


def another_password(server):
    """Connections that are there stay; new ones are refused until it is taken back."""
    with server.client() as client:
        client.config_set("requirepass", "other")
        client.execute_command("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")
        client.config_set("requirepass", "")


@pytest.mark.parametrize("break_it", [restarted, cut, another_password])
async def test_it_subscribes_again_and_wakes_everybody(redis_server, break_it):
    """RDS-01: what was missed meanwhile is looked up, since all are woken once."""
    with structlog.testing.capture_logs() as lines:
        await broken_and_mended(redis_server, break_it)
    assert "store_news_lost" in [line["event"] for line in lines]


async def broken_and_mended(redis_server, break_it):
    async with listening(redis_server.url) as (news, heard):
        break_it(redis_server)
        await until(lambda: len(heard) >= 2)
        assert {("one", ""), ("two", "")} == set(heard)
        heard.clear()
        await until_published(news, "again")
        await until(lambda: ("one", "again") in heard)


@pytest.mark.soak
async def test_a_frozen_server_is_noticed(redis_server):
    """RDS-01: a connection on which nothing comes any more is not waited on for ever."""
    async with listening(redis_server.url) as (news, heard):
        redis_server.freeze()
        await until(lambda: not news._connection.available)
        await asyncio.sleep(6)
        redis_server.thaw()
        await until(lambda: len(heard) >= 2)
        await until_published(news, "again")
        await until(lambda: ("one", "again") in heard)


async def until_published(news, message):
    await news._connection.wait_available()
    for _ in range(100):
        with contextlib.suppress(StoreUnavailableError):
            return await news.publish("noria:one", message)
        await news._connection.wait_available()
    raise AssertionError("never published")
