"""Routers on one Redis: together they keep a tenant's limits, whoever dies or goes away."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import grpc
import pytest
import structlog

from noria.v1 import chat_pb2, chat_pb2_grpc
from router.app import running_router
from router.config import RouterConfig
from router.connection import background
from router.store.redis_limits import limits_key
from tests.router.fakes import FakeTokenizer, FakeWorker, bearer, next_event, refusal, spec, until

LEASE_S = 1.0
# Burst and pace: a second brings one more.
PER_MINUTE, TOKENS_PER_MINUTE = 60, 200
TENANTS = {
    "free": "",
    "rate": f"requests_per_minute = {PER_MINUTE}",
    "tokens": f"tokens_per_minute = {TOKENS_PER_MINUTE}",
    "places": "concurrent_requests = 4\ntokens_per_minute = 6000",
}
# Two prompt tokens, and of seven asked for the two that are put out at once.
USED, RESERVED = 4, 9


def keys_file(folder):
    path = folder / "keys.toml"
    path.write_text(
        "\n".join(
            f'[[tenants]]\nname = "{name}"\n{fields}\n'
            f'[[tenants.keys]]\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            for name, fields in TENANTS.items()
        )
    )
    return path


@contextlib.asynccontextmanager
async def fakes(count=2):
    """Of each router's own: a tokenizer, and a worker with room for all, which answers at once."""
    pairs = [
        (FakeTokenizer(), FakeWorker(max_num_seqs=256, num_blocks=100_000)) for _ in range(count)
    ]
    for tokenizer, worker in pairs:
        worker.auto = [10]
        await tokenizer.start()
        await worker.start()
    try:
        async with background([say_load(worker) for _, worker in pairs]):
            yield pairs
    finally:
        for tokenizer, worker in pairs:
            await worker.stop()
            await tokenizer.stop()


async def say_load(worker):
    while True:
        await asyncio.sleep(0.3)
        worker.say_load()


@dataclass
class Client:
    """Calls to one router, and what became of them, by tenant and status or reason."""

    address: str
    outcomes: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub = chat_pb2_grpc.ChatServiceStub(self.channel)

    async def ask(self, tenant, **fields):
        request = chat_pb2.ChatRequest(spec=spec("hi", **{"max_tokens": 7, **fields}))
        try:
            await self.stub.Chat(request, metadata=bearer(tenant), timeout=20)
        except grpc.aio.AioRpcError as error:
            told = refusal(error)
            outcome = told.reason.value if told else error.code().name
        else:
            outcome = "SERVED"
        self.outcomes[tenant, outcome] += 1
        return outcome

    async def press(self, tenant, enough):
        """One after another, whatever becomes of them."""
        while not enough():
            await self.ask(tenant)

    def stream(self, tenant, **fields):
        request = chat_pb2.StreamChatRequest(spec=spec("hi", **{"max_tokens": 7, **fields}))
        return self.stub.StreamChat(request, metadata=bearer(tenant), timeout=60)

    def served(self, tenant):
        return self.outcomes[tenant, "SERVED"]

    def not_served(self, tenant):
        """Why not, of those that were not."""
        return {outcome for (name, outcome), _ in self.outcomes.items() if name == tenant} - {
            "SERVED"
        }


async def press_all(clients, enough, tenants):
    """Many at once at every router; how many seconds it took."""
    began = time.monotonic()
    many = range(6)
    pressing = [client.press(name, enough) for client in clients for name in tenants for _ in many]
    async with asyncio.timeout(100):
        await asyncio.gather(*pressing)
    return time.monotonic() - began


def after(seconds, also=lambda: True):
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end and also()


def all_is_gone(clients):
    """Whether every router has refused by both rates, and what is left is not a request's worth."""
    used = USED * sum(client.served("tokens") for client in clients)
    return all_refuse(clients) and used > TOKENS_PER_MINUTE - RESERVED


def all_refuse(clients):
    return all(client.not_served(name) for client in clients for name in ("rate", "tokens"))


@contextlib.asynccontextmanager
async def processes(folder, redis_url, pairs):
    """Routers as processes: these, and a client of each."""
    argv = (
        sys.executable, "-m", "router", "--listen", "127.0.0.1:0", "--redis-url", redis_url,
        "--redis-timeout-s", "5", "--lease-s", str(LEASE_S),
        "--keys-file", str(keys_file(folder)),
    )  # fmt: skip
    started = [
        await asyncio.create_subprocess_exec(
            *(*argv, "--tokenizer", tokenizer.address, "--worker", worker.address),
            stderr=asyncio.subprocess.PIPE,
            env=dict(os.environ),
        )
        for tokenizer, worker in pairs
    ]
    reading = []
    try:
        addresses = []
        for process in started:
            addresses.append(await ready(process))
            reading.append(asyncio.create_task(drain(process.stderr)))
        yield started, [Client(address) for address in addresses]
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await asyncio.gather(*reading)


async def ready(process):
    address = ""
    async with asyncio.timeout(30):
        while line := await process.stderr.readline():
            told = json.loads(line)
            address = told.get("address", address)
            if told["event"] == "ready":
                return address
    raise AssertionError("the router ended before it was ready")


async def drain(stream):
    while await stream.readline():
        pass


def held(client, tenant):
    """What living routers hold of a tenant in Redis: requests, encodes, open tokens."""
    seconds, micros = client.time()
    now_ms = seconds * 1000 + micros // 1000
    accounts = [
        [int(number) for number in value.split()]
        for name, value in client.hgetall(limits_key(tenant)).items()
        if name.startswith("r:")
    ]
    living = [account for account in accounts if account[0] > now_ms]
    return tuple(sum(account[place] for account in living) for place in (1, 2, 5))


@pytest.mark.parametrize("seconds", [0.5, pytest.param(20.0, marks=pytest.mark.soak)])
async def test_two_routers_admit_one_limit_and_a_killed_one_frees_what_it_held(
    tmp_path, redis_url, shared_redis_server, seconds
):
    """Never more than the limit and one bucket, and all of that; the other router serves on."""
    async with (
        fakes() as pairs,
        processes(tmp_path, redis_url, pairs) as (routers, clients),
    ):
        doomed, other = clients
        enough = after(seconds, lambda: all_is_gone(clients))
        took_s = await press_all(clients, enough, ("rate", "tokens"))
        admitted = sum(client.served("rate") for client in clients)
        assert PER_MINUTE <= admitted <= PER_MINUTE * (1 + took_s / 60) + 1
        used = USED * sum(client.served("tokens") for client in clients)
        assert TOKENS_PER_MINUTE - RESERVED <= used <= TOKENS_PER_MINUTE * (1 + took_s / 60) + 1
        for client in clients:
            assert client.served("rate") > 0
            assert client.not_served("rate") == {"REQUESTS_PER_MINUTE"}
            assert client.not_served("tokens") == {"TOKENS_PER_MINUTE"}

        worker = pairs[0][1]
        worker.auto = None
        before = len(worker.submits)
        running = [doomed.stream("places", max_tokens=900) for _ in range(4)]
        await until(lambda: len(worker.submits) == before + 4, 20)
        assert await other.ask("places") == "CONCURRENT_REQUESTS"
        routers[0].send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        serving = asyncio.create_task(other.press("free", after(LEASE_S + 1)))
        assert await other.ask("places") == "CONCURRENT_REQUESTS"
        await until_served(other, "places")
        assert time.monotonic() - killed_s < LEASE_S + 1
        with shared_redis_server.client() as client:
            await asyncio.sleep(0.1)
            assert held(client, "places") == (0, 0, 0)
            level = int(client.hget(limits_key("places"), "tk"))
        # The 3,600 tokens that had been reserved are there again, but for what was asked since.
        assert level >= (6000 - 4 * 2 - 20 * USED) * 60_000
        await serving
        assert other.not_served("free") == set()
        assert other.served("free") > 0
        for call in running:
            assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def until_served(client, tenant):
    async with asyncio.timeout(20):
        while await client.ask(tenant) != "SERVED":
            pass


@contextlib.asynccontextmanager
async def routers_here(folder, redis_url, pairs):
    """Routers in this process, where a test can look into them, and a client of each."""
    async with contextlib.AsyncExitStack() as stack:
        keys = keys_file(folder)
        routers = []
        for tokenizer, worker in pairs:
            config = RouterConfig(
                (tokenizer.address,),
                (worker.address,),
                keys_file=keys,
                redis_url=redis_url,
                redis_timeout_s=0.1,
                lease_s=LEASE_S,
                listen="127.0.0.1:0",
            )
            routers.append(await stack.enter_async_context(running_router(config)))
            await asyncio.wait_for(routers[-1].wait_ready(), 10)
        yield routers, [Client(router.address) for router in routers]


@pytest.mark.parametrize(
    ("how", "seconds"),
    [
        ("kill", 0.5),
        ("freeze", 0.5),
        ("full", 0.3),
        *(
            pytest.param(how, 10.0, marks=pytest.mark.soak)
            for how in ("stop", "kill", "freeze", "full")
        ),
    ],
)
async def test_redis_goes_and_comes_back_under_load_and_no_request_fails_of_it(
    tmp_path, redis_server, how, seconds
):
    """Each router grants what it would alone, at most; what it did is told when Redis is back."""
    with structlog.testing.capture_logs() as lines:
        async with (
            fakes() as pairs,
            routers_here(tmp_path, redis_server.url, pairs) as (routers, clients),
        ):
            tenants = ("free", "rate", "tokens", "places")
            enough = after(3 * seconds, lambda: all_refuse(clients))
            load = asyncio.create_task(press_all(clients, enough, tenants))
            await asyncio.sleep(seconds)
            go(redis_server, how)
            await asyncio.sleep(seconds)
            await asyncio.to_thread(come_back, redis_server, how)
            took_s = await load
            for client in clients:
                assert client.not_served("free") == set()
                assert client.not_served("rate") == {"REQUESTS_PER_MINUTE"}
                assert client.not_served("tokens") == {"TOKENS_PER_MINUTE"}
                assert client.not_served("places") <= {"CONCURRENT_REQUESTS", "TOKENS_PER_MINUTE"}
                assert 0 < client.served("rate") <= PER_MINUTE * (1 + took_s / 60) + 1
                assert USED * client.served("tokens") <= TOKENS_PER_MINUTE * (1 + took_s / 60) + 1
            await until(lambda: all(drained(router) for router in routers), 15)
            with redis_server.client() as client:
                for tenant in TENANTS:
                    assert held(client, tenant) == (0, 0, 0)
                told = [int(value.split()[3]) for value in accounts_of(client, "rate")]
            assert sum(told) == sum(client.served("rate") for client in clients)
    events = Counter(line["event"] for line in lines)
    assert events["limits_told_again"] >= 2
    assert not events["defect"]


def go(server, how):
    if how == "full":
        with server.client() as client:
            client.config_set("maxmemory", 1)
    else:
        getattr(server, how)()


def come_back(server, how):
    if how == "full":
        with server.client() as client:
            client.config_set("maxmemory", 0)
    elif how == "freeze":
        server.thaw()
    else:
        server.start()


def accounts_of(client, tenant):
    stored = client.hgetall(limits_key(tenant))
    return [value for name, value in stored.items() if name.startswith("r:")]


def drained(router):
    state = router.state()
    return state.store_up and not state.sharing.untold and not any(state.held.values())


async def test_what_redis_holds_of_limits_names_no_key_and_no_text(tmp_path, redis_server):
    """SEC-07: one name for a tenant, and figures."""
    async with (
        fakes(1) as pairs,
        routers_here(tmp_path, redis_server.url, pairs) as (_, (client,)),
    ):
        pairs[0][1].auto = None
        call = client.stream("places")
        assert (await next_event(call)).HasField("message_start")
        with redis_server.client() as redis:
            names = [name for name in redis.scan_iter() if ":limits:" in name]
            assert names == ["noria:limits:{places}"]
            stored = redis.hgetall(names[0])
        assert set(stored) - {"at", "tk"} == {name for name in stored if name.startswith("r:")}
        assert all(set(value) <= set("-0123456789 ") for value in stored.values())
        call.cancel()
