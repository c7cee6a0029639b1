"""A router that is killed, or stands still for a while, leaves one row for each request."""

import asyncio
import contextlib
import signal
import time
from collections import Counter
from datetime import UTC, datetime, timedelta

import grpc
import pytest
import structlog

from noria.cli.supervisor import unless_died
from noria.v1 import chat_pb2, chat_pb2_grpc
from router.store.redis_connection import redis_connection
from router.store.redis_ledger import RedisLedger
from tests.support.processes import ANY_PORT, Fleet, address, exit_code
from tests.support.replicas import chat_spec, key_of, keys_file
from tests.support.waiting import until
from tests.support.worker_client import StepGate
from tokenizer_svc.app import running_tokenizer
from tokenizer_svc.config import TokenizerConfig
from worker.app import running_worker
from worker.config import WorkerConfig

LEASE_S = 0.6


class Asked:
    """Requests through one router: how each ended, by id."""

    def __init__(self, target):
        self.channel = grpc.aio.insecure_channel(target)
        self.stub = chat_pb2_grpc.ChatServiceStub(self.channel)
        self.ended, self.tasks, self.begun = {}, [], set()
        # When each id became known here.
        self.known = {}

    def ask(self, count, max_tokens):
        for _ in range(count):
            self.tasks.append(asyncio.create_task(self._ask(max_tokens)))

    async def _ask(self, max_tokens):
        request = chat_pb2.StreamChatRequest(spec=chat_spec("네", max_tokens))
        call = self.stub.StreamChat(request, metadata=key_of("search"), timeout=60)
        request_id = ""
        with contextlib.suppress(grpc.aio.AioRpcError):
            request_id = dict(await call.initial_metadata()).get("noria-request-id", "")
            if request_id:
                self.known[request_id] = time.monotonic()
            while await call.read() is not grpc.aio.EOF:
                self.begun.add(request_id)
        self.ended[request_id] = await call.code()


@contextlib.asynccontextmanager
async def two_routers(model, script, folder, redis_url):
    """Routers as processes; their worker and tokenizer here."""
    async with contextlib.AsyncExitStack() as held:
        enter = held.enter_async_context
        tokenizer = await enter(running_tokenizer(TokenizerConfig(model, "demo", ANY_PORT)))
        config = WorkerConfig(model, "demo", ANY_PORT, script=script, num_blocks=512)
        worker = await enter(running_worker(config))
        await tokenizer.ready()
        gate = StepGate((await worker.ready()).runner)
        running = Fleet(model, script, held)
        flags = (
            "--tokenizer", tokenizer.address, "--worker", worker.address,
            "--listen", ANY_PORT, "--keys-file", str(keys_file(folder)),
            "--redis-url", redis_url, "--redis-timeout-s", "5", "--lease-s", str(LEASE_S),
        )  # fmt: skip
        names = ("router 0", "router 1")
        children = await asyncio.gather(*(running.start(name, "router", *flags) for name in names))
        for child in children:
            await unless_died([child], child.event("ready"))
        yield running, children, worker, gate


async def all_rows(ledger):
    days = [(datetime.now(UTC) - timedelta(days=ago)).date().isoformat() for ago in (1, 0)]
    return [row for day in days for row in await ledger.rows(day)]


async def until_rows(ledger, condition):
    for _ in range(400):
        rows = await all_rows(ledger)
        if condition({row.request_id: row.outcome for row in rows}):
            return rows
        await asyncio.sleep(0.05)
    raise AssertionError(f"not within 20 s; outcomes: {Counter(row.outcome for row in rows)}")


async def until_open(ledger, router_id, count):
    """Rows are opened beside their requests: a moment after these have begun all are there."""
    for _ in range(400):
        if len(await ledger.open_rows(router_id)) == count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not within 2 s")


async def test_each_request_has_one_row_though_a_router_pauses_and_is_then_killed(
    golden_model, script_file, tmp_path, redis_url
):
    """Of the paused one: lost, until it says how they ended. Of the killed one: lost for good."""
    script = script_file(mean_output_tokens=0)
    async with (
        two_routers(golden_model, script, tmp_path, redis_url) as (running, children, worker, gate),
        redis_connection(redis_url, structlog.get_logger(), timeout_s=5) as connection,
    ):
        ledger = RedisLedger(connection)
        doomed, other = [Asked(await address(child)) for child in children]

        gate.let_through(20)
        doomed.ask(6, max_tokens=100)
        await until(lambda: len(doomed.begun) == 6)
        router_id = next(iter(doomed.begun)).split("-")[1]
        await until_open(ledger, router_id, 6)
        children[0].process.send_signal(signal.SIGSTOP)
        await until_rows(ledger, lambda seen: set(seen) == doomed.begun)
        assert {row.outcome for row in await all_rows(ledger)} == {"LOST"}
        children[0].process.send_signal(signal.SIGCONT)
        gate.let_through(200)
        await asyncio.gather(*doomed.tasks)
        assert set(doomed.ended.values()) == {grpc.StatusCode.OK}
        rows = await until_rows(ledger, lambda seen: set(seen.values()) == {"SERVED"})
        assert {row.request_id for row in rows} == set(doomed.ended)
        assert {row.delivered_tokens for row in rows} == {100}

        doomed.ask(6, max_tokens=3)
        await asyncio.gather(*doomed.tasks)
        served = set(doomed.ended)
        doomed.ask(8, max_tokens=2000)
        other.ask(8, max_tokens=100)
        await until(lambda: len(doomed.begun) == 20 and len(other.begun) == 8)
        await until_open(ledger, router_id, 8)
        await until(lambda: worker.state().live_submits == 16)
        steps = worker.state().load.step_count
        gate.let_through(5)
        await until(lambda: worker.state().load.step_count >= steps + 3)
        await exit_code(children[0], signal.SIGKILL)
        gate.let_through(10_000)
        await asyncio.gather(*doomed.tasks, *other.tasks)
        other.ask(4, max_tokens=3)
        await asyncio.gather(*other.tasks)

        assert set(other.ended.values()) == {grpc.StatusCode.OK}
        every = set(doomed.ended) | set(other.ended)
        rows = await until_rows(ledger, lambda seen: set(seen) == every)
        outcomes = {row.request_id: row.outcome for row in rows}
        assert len(rows) == len(every) == 20 + 12
        assert {i for i, outcome in outcomes.items() if outcome == "LOST"} == every - served - set(
            other.ended
        )
        # What was computed for them and not told is lost time of the worker, not a tenant's.
        told = sum(row.device_us for row in rows)
        await until(
            lambda: told + worker.state().accounts.lost.device_us == worker.state().load.busy_us
        )
        assert worker.state().accounts.lost.generated_tokens > 0
        await until(lambda: running.count("router 1", "ledger_rows_lost") == 2)


@pytest.mark.soak
async def test_killed_under_load_what_was_admitted_a_moment_before_has_its_row(
    golden_model, script_file, tmp_path, redis_url
):
    """Some 50 requests/s at each router; a quarter of a second is the moment, on two busy cores."""
    script = script_file(mean_output_tokens=20, step_seconds=0.002)
    async with (
        two_routers(golden_model, script, tmp_path, redis_url) as (_, children, worker, gate),
        redis_connection(redis_url, structlog.get_logger(), timeout_s=5) as connection,
    ):
        ledger = RedisLedger(connection)
        gate.let_through(10**6)
        doomed, other = [Asked(await address(child)) for child in children]
        for _ in range(150):
            doomed.ask(1, max_tokens=30)
            other.ask(1, max_tokens=30)
            await asyncio.sleep(0.02)
        killed_at = time.monotonic()
        await exit_code(children[0], signal.SIGKILL)
        await asyncio.gather(*doomed.tasks, *other.tasks)
        old = {i for i, at in doomed.known.items() if at < killed_at - 0.25} | set(other.known)
        rows = await until_rows(ledger, lambda seen: old <= set(seen))
        assert max(Counter(row.request_id for row in rows).values()) == 1
        assert set(other.ended.values()) == {grpc.StatusCode.OK}
        young = doomed.begun - {row.request_id for row in rows}
        print(f"{len(young)} of {len(doomed.begun)} that had begun were too young to have a row")
        # What the killed router had been told of and had not written is in none of its rows.
        told = worker.state().accounts.told
        assert 0 < sum(row.device_us for row in rows) <= told.device_us
        await until(lambda: worker.state().live_submits == 0)
