"""The fleet seen and steered from the command line, through real services."""

import asyncio
import dataclasses
import hashlib
import json

import pytest
import structlog
from click.testing import CliRunner

from noria import AsyncClient
from noria.cli.main import main
from router.app import running_router
from tests.support.canary import API_KEY, CANARY
from tests.support.stack import running_stack
from tests.support.waiting import until

KEYS = """
[[tenants]]
name = "operators"
admin = true
[[tenants.keys]]
sha256 = "{digest}"
"""


@pytest.fixture
def settings(tmp_path, script_file):
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS.format(digest=hashlib.sha256(API_KEY.encode()).hexdigest()))
    return {
        "router": {"keys_file": keys, "api_key_sha256": ""},
        "script": script_file(mean_output_tokens=0, step_seconds=0.01, token_ids=[32, 127]),
        "max_num_seqs": 8,
    }


async def noria(address, *argv, fails=False):
    """What a command writes to its standard output, or why it failed."""
    command = [*argv, "--address", address]
    told = await asyncio.to_thread(
        CliRunner().invoke, main, command, env={"NORIA_API_KEY": API_KEY}
    )
    assert (told.exit_code != 0) is fails, told.stderr
    return told.stderr if fails else told.stdout


@pytest.fixture(autouse=True)
def no_logs():
    # What the services log here would be taken for what a command prints.
    with structlog.testing.capture_logs() as lines:
        yield lines


async def test_a_drained_worker_finishes_what_it_has_and_takes_nothing_from_any_router(
    golden_model, settings, no_logs
):
    """Any router may order it and take it back; all of them see it."""
    async with running_stack(golden_model, num_workers=2, **settings) as running:
        first, _, drained, other = running.addresses
        config = dataclasses.replace(running.router._config, listen="127.0.0.1:0")
        async with (
            running_router(config) as second,
            AsyncClient(second.address, api_key=API_KEY) as elsewhere,
        ):
            await second.wait_ready()
            await until(lambda: len(list(second.registry)) == 2)

            async def workers(count=6):
                clients = [running.client, elsewhere] * (count // 2)
                asked = [client.chat("a", max_tokens=3) for client in clients]
                return {result.timeline.worker_id for result in await asyncio.gather(*asked)}

            long = [asyncio.create_task(elsewhere.chat("a", max_tokens=60)) for _ in range(4)]
            state = {w.worker_id: w for w in second.registry}[drained]
            await until(lambda: any(a.stream.has_begun for a in state.attempts.values()))
            told = await noria(first, "drain", drained)
            assert told.startswith(f"{drained} takes nothing new; ")
            assert "1 other worker of demo" in told
            # The order is given by one router; the worker's next load tells the others.
            await until(lambda: state.load.draining)
            assert await workers() == {other}
            assert "draining" in await noria(second.address, "status")
            results = await asyncio.gather(*long)
            assert {result.usage.output_tokens for result in results} == {60}
            assert drained in {result.timeline.worker_id for result in results}
            assert "is empty" in await noria(first, "drain", drained, "--wait")
            assert "takes requests again" in await noria(second.address, "drain", drained, "--undo")
            await until(
                lambda: (
                    not any(w.load.draining for r in (running.router, second) for w in r.registry)
                )
            )
            assert drained in await workers()
    orders = [line for line in no_logs if line["event"] == "worker_drain_ordered"]
    assert [line["draining"] for line in orders] == [True, True, False]
    assert {line["by"][:4] for line in orders} == {"key-"}


async def test_requests_of_a_model_whose_only_worker_is_drained_wait_until_it_is_not(
    golden_model, settings
):
    async with running_stack(golden_model, **settings) as running:
        router, _, worker = running.addresses
        assert "no other worker serves demo" in await noria(router, "drain", worker)
        state = running.router.state()
        assert (state.workers["draining"], state.capacity["demo"].sequences) == (1, 0)
        waiting = asyncio.create_task(running.client.chat("a", max_tokens=3))
        await until(lambda: running.router.held()["queued_tokens"])
        (told,) = json.loads(await noria(router, "ps", "--json"))["requests"]
        assert (told["phase"], told["worker_id"]) == ("PHASE_KIND_QUEUE", "")
        status = json.loads(await noria(router, "status", "--json"))
        assert status["models"][0]["queued_requests"] == 1
        assert status["workers"][0]["state"] == "WORKER_STATE_DRAINING"
        await noria(router, "drain", worker, "--undo")
        assert (await waiting).usage.output_tokens == 3
        state = running.router.state()
        assert (state.workers["draining"], state.capacity["demo"].sequences) == (0, 8)


async def test_live_requests_are_listed_without_their_text(golden_model, settings):
    async with running_stack(golden_model, **settings) as running:
        router, _, worker = running.addresses
        asked = asyncio.create_task(running.client.chat(CANARY, max_tokens=100))
        await until(lambda: any(each.record.output_tokens for each in running.router._live))
        told = await noria(router, "ps")
        head, line = told.splitlines()
        assert head.split() == [
            "REQUEST", "TENANT", "MODEL", "PHASE", "AGE", "IN", "OUT", "WORKER",
        ]  # fmt: skip
        request_id, tenant, model, phase, *_, place = line.split()
        assert (tenant, model, phase, place) == ("operators", "demo", "decode", worker)
        assert CANARY not in told + await noria(router, "ps", "--json")
        for foreign in (("--tenant", "others"), ("--model", "others")):
            assert json.loads(await noria(router, "ps", "--json", *foreign))["requests"] == []
        assert "limit" in await noria(router, "ps", "--limit", "0", fails=True)
        await running.client.cancel(request_id)
        with pytest.raises(Exception, match="CANCELLED"):
            await asked
        assert (await noria(router, "ps")).split() == head.split()


async def test_a_worker_that_is_not_there_is_named_with_those_that_are(golden_model, settings):
    """One that should be there and is not connected is shown as unreachable."""
    async with running_stack(golden_model, **settings) as running:
        _, _, worker = running.addresses
        config = dataclasses.replace(
            running.router._config, listen="127.0.0.1:0", workers=(worker, "127.0.0.1:9")
        )
        async with running_router(config) as second:
            await second.wait_ready()
            *_, line = (await noria(second.address, "status")).split("\n\n")[2].splitlines()
            assert line.split()[:3] == ["127.0.0.1:9", "-", "unreachable"]
        router = running.addresses[0]
        told = await noria(router, "drain", "10.9.9.9:1", fails=True)
        assert f"no such worker is connected; there are {worker}" in told
