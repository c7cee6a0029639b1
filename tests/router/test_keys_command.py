"""`noria keys` at a running router that shares a Redis."""

import asyncio
import subprocess
import sys

import grpc
import pytest
import structlog
from click.testing import CliRunner

from noria.cli.main import main
from noria.v1 import chat_pb2
from router.first_key import main as first_key_main
from router.first_key import make_first_key
from tests.router.fakes import bearer, events, routed

URL = "NORIA_ROUTER_REDIS_URL"


def first_key(url):
    """What `noria keys init` runs, in this process."""
    try:
        return CliRunner().invoke(first_key_main, env={URL: url})
    finally:
        structlog.reset_defaults()


class Command:
    def __init__(self, address, key):
        self._address = address
        self._environment = {"NORIA_API_KEY": key}

    async def __call__(self, *args, fails=False):
        """Its standard output; or, if it is to fail, its standard error."""
        argv = ["keys", *args, "--address", self._address]
        result = await asyncio.to_thread(CliRunner().invoke, main, argv, env=self._environment)
        assert (result.exit_code != 0) == fails, result.stderr
        return result.stderr if fails else result.stdout


@pytest.fixture
async def keys(redis_url):
    # What the router logs here would be taken for what the command prints.
    with structlog.testing.capture_logs():
        key = await make_first_key(redis_url, structlog.get_logger())
        async with routed(api_key_sha256="", redis_url=redis_url, redis_timeout_s=5.0) as setup:
            setup.worker.auto = [10]
            yield Command(setup.router.address, key), setup


def test_the_first_key_is_made_once_and_told_alone(redis_url):
    argv = [sys.executable, "-m", "noria.cli", "keys", "init"]
    environment = {URL: redis_url, "PYTHONPATH": ":".join(sys.path)}
    made = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    key = made.stdout.removesuffix("\n")
    assert key.startswith("noria-")
    assert key.isprintable()
    assert key not in made.stderr
    again = first_key(redis_url)
    assert again.exit_code == 1
    assert "an administrator with a live key" in again.stderr


@pytest.mark.parametrize("url", ["http://x:PASSMARK@h", "redis://:PASSMARK@127.0.0.1:1/0"])
def test_a_redis_that_cannot_be_used_is_told_without_its_url(url):
    refused = first_key(url)
    assert refused.exit_code != 0
    assert "edis" in refused.stderr
    assert "PASSMARK" not in refused.output


async def test_the_life_of_a_key(keys):
    """Made, rotated and revoked; each step as an operator would take it."""
    command, setup = keys
    await command("tenant", "search", "--model", "fake-model", "--requests-per-minute", "1000")
    old = (await command("create", "search", "--label", "ci")).strip()
    await events(setup.stream(key=old))
    listed = (await command("list", "--tenant", "search")).splitlines()
    assert listed[0].split() == ["TENANT", "KEY", "STATE", "SCOPE", "LABEL"]
    scope = (await command("tenants")).splitlines()[2].split()
    assert scope == ["search", "1", "models=fake-model", "priority_ceiling=100",
                     "requests_per_minute=1000"]  # fmt: skip
    tenant, key_id, *rest = listed[1].split()
    assert (tenant, rest) == ("search", ["live", "-", "ci"])
    new = (await command("create", "search", "--expires-in", "1h")).strip()
    assert "at most 2" in await command("create", "search", fails=True)
    await command("expire", key_id, "--in", "0s")
    await events(setup.stream(key=new))
    assert await status(setup, old) is grpc.StatusCode.UNAUTHENTICATED
    await command("expire", key_id, "--never")
    await events(setup.stream(key=old))
    await command("revoke", key_id)
    assert await status(setup, old) is grpc.StatusCode.UNAUTHENTICATED
    assert key_id not in await command("list")
    assert "revoked 20" in await command("list", "--all")
    changes = (await command("log", "--limit", "2")).splitlines()
    assert [line.split()[2:] for line in changes[1:]] == [
        ["revoke", "search", key_id], ["expire", "search", key_id],
    ]  # fmt: skip


async def status(setup, key):
    call = setup.stub.ListModels(chat_pb2.ListModelsRequest(), metadata=bearer(key))
    return await call.code()


async def test_what_went_wrong_is_told_on_one_line(keys):
    command, _ = keys
    assert "KEY_NOT_FOUND" in await command("revoke", "key-none", fails=True)
    assert "one of --in and --never" in await command("expire", "key-none", fails=True)
    assert "as 90d" in await command("create", "search", "--expires-in", "1y", fails=True)
    assert "no such tenant" in await command("create", "nobody", fails=True)
    other = Command("127.0.0.1:1", "x")
    assert "no server answers at 127.0.0.1:1" in await other("list", fails=True)
