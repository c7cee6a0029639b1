"""Workers as processes that a router finds in Redis alone: frozen ones, and a rolling restart."""

import asyncio
import contextlib
import signal

import pytest

from noria import AsyncClient
from tests.support.processes import address, exit_code, worker_fleet
from tests.support.stack import API_KEY
from tests.support.waiting import until


@contextlib.asynccontextmanager
async def found(golden_model, script_file, redis_server):
    """Two workers that registered, a router that is told of none, and a client."""
    script = script_file(mean_output_tokens=0, step_seconds=0.005, token_ids=[32, 127])
    url = redis_server.url
    flags = ("--num-blocks", "512", "--block-size", "16", "--redis-url", url)
    router = {"workers": (), "redis_url": url, "redis_timeout_s": 5.0}
    async with (
        worker_fleet(golden_model, script, worker_flags=flags, router=router) as (
            fleet,
            serving,
            _,
        ),
        AsyncClient(serving.address, api_key=API_KEY) as client,
    ):
        yield fleet, serving, client, flags


def connected(router):
    """Addresses and instances."""
    return {worker.worker_id: worker.figures.instance_id for worker in router.registry}


@pytest.mark.soak
async def test_a_worker_frozen_beyond_its_lease_is_found_again_as_the_same(
    golden_model, script_file, redis_server
):
    """RDS-05: 25 s are more than twice a lease, and more than its connection stands."""
    async with found(golden_model, script_file, redis_server) as (fleet, router, client, _):
        before = connected(router)
        frozen = fleet.children["worker 0"]
        place = await address(frozen)
        frozen.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(25)
        await until(lambda: place not in connected(router), timeout=30)
        await until(lambda: router.state().workers["known"] == 1, timeout=30)
        result = await client.chat("q", max_tokens=5)
        assert result.timeline.worker_id != place
        frozen.process.send_signal(signal.SIGCONT)
        await until(lambda: connected(router) == before, timeout=10)


@pytest.mark.soak
async def test_a_rolling_restart_fails_no_request(golden_model, script_file, redis_server):
    """K8S-02, GRP-07: one comes, one is told to stop and ends well, and so on."""
    async with found(golden_model, script_file, redis_server) as (fleet, router, client, flags):
        stop, served = asyncio.Event(), []

        async def load():
            while not stop.is_set():
                served.append((await client.chat("q", max_tokens=20)).timeline.worker_id)

        loads = [asyncio.create_task(load()) for _ in range(6)]
        for number in range(2):
            new = await fleet.start_worker(f"new {number}", *flags)
            place = await address(new)
            await until(lambda place=place: place in served, timeout=30)
            old = await address(fleet.children[f"worker {number}"])
            assert await exit_code(fleet.children[f"worker {number}"]) == 0
            await until(lambda old=old: old not in connected(router))
            since = len(served)
            await until(lambda since=since: len(served) > since + 30, timeout=30)
            assert old not in served[since:]
        stop.set()
        await asyncio.gather(*loads)
        assert router.state().workers["known"] == 2
