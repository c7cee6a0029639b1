"""A whole worker that registers in Redis: found while it serves, and no longer."""

import pytest

from noria.service.leases import WORKERS, leases_key
from tests.support.waiting import until
from worker.app import running_worker
from worker.config import WorkerConfig


@pytest.fixture
def registered(shared_redis_server, redis_url):
    """The addresses that hold a lease."""
    with shared_redis_server.client() as client:
        yield lambda: client.zrange(leases_key(WORKERS), 0, -1)


@pytest.fixture
def config(golden_model, script_file, redis_url):
    path = script_file((), mean_output_tokens=0)
    return WorkerConfig(model=golden_model, script=path, listen="127.0.0.1:0", redis_url=redis_url)


async def test_it_is_found_once_it_is_ready_and_no_more_when_it_drains(config, registered):
    async with running_worker(config) as worker:
        assert registered() == []
        await worker.ready()
        await until(lambda: registered() == [worker.address])
        await worker.drain(0)
        assert registered() == []
    assert registered() == []


async def test_one_that_is_ended_without_a_drain_is_not_found_either(config, registered):
    async with running_worker(config) as worker:
        await worker.ready()
        await until(registered)
    assert registered() == []
