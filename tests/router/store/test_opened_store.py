"""Which store a router gets, and what it needs for that."""

import subprocess
import sys

import pytest
import structlog

from router.auth import ApiKey, Tenant
from router.store.base import StoreURLError
from router.store.memory_keys import MemoryKeys
from router.store.opened import open_store
from router.store.redis_keys import RedisKeys

WITHOUT_REDIS = """
import asyncio, sys, structlog
sys.modules["redis"] = None
import router.app, router.__main__, worker.app
from router.store.base import StoreURLError
from router.store.opened import open_store
from worker.lease import worker_lease

async def main():
    log = structlog.get_logger()
    async with open_store("", log) as store, worker_lease("", "w:1", log):
        print(store.available)
    for opened in (open_store("redis://h", log), worker_lease("redis://h", "w:1", log)):
        try:
            async with opened:
                pass
        except ValueError as error:
            print(error)

asyncio.run(main())
"""


def test_without_a_url_nobody_needs_the_redis_package():
    argv = [sys.executable, "-c", WITHOUT_REDIS]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == "True"
    assert "the extra `router` brings it" in said[1]
    assert "the extra `worker` brings it" in said[2]


@pytest.mark.parametrize("shares", [False, True])
async def test_keys_of_a_file_are_the_only_ones(redis_url, shares):
    """With a Redis the rest is shared all the same."""
    url = redis_url if shares else ""
    keys = {"a1" * 32: ApiKey(Tenant("t"))}
    async with open_store(url, structlog.get_logger(), keys, timeout_s=5) as store:
        assert store.keys is store.file_keys
        assert (store.shared is not None) == shares
    async with open_store(url, structlog.get_logger(), timeout_s=5) as store:
        assert isinstance(store.keys, RedisKeys if shares else MemoryKeys)


async def test_a_url_that_cannot_be_used_stops_the_start():
    with pytest.raises(StoreURLError):
        async with open_store("http://h", structlog.get_logger()):
            pass
