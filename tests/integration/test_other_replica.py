"""A request is looked up and cancelled through any router, at every phase of its life."""

import asyncio
import contextlib

import grpc
import pytest

from noria.v1 import chat_pb2, common_pb2
from tests.support.replicas import chat_spec, key_of, running_replicas
from tests.support.waiting import until

MINE, OTHERS = key_of("search"), key_of("mail")
LONG = "토마토는 과일이야? " * 40


@pytest.fixture
async def replicas(golden_model, script_file, tmp_path, redis_url):
    script = script_file(mean_output_tokens=0)
    async with running_replicas(
        golden_model, tmp_path, redis_url, gated=True,
        script=script, max_num_seqs=1, max_num_batched_tokens=64,
    ) as running:  # fmt: skip
        yield running
        let_run(running)


class Reading:
    """A stream through the first router, read as it comes."""

    def __init__(self, replicas, text="네", max_tokens=500):
        request = chat_pb2.StreamChatRequest(spec=chat_spec(text, max_tokens))
        self.call = replicas.stubs[0].StreamChat(request, metadata=MINE)
        self.task = asyncio.create_task(self._read())

    async def _read(self):
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return await self.call.code()

    async def request_id(self):
        return dict(await self.call.initial_metadata())["noria-request-id"]


async def record(replicas, router, request_id, key=MINE):
    request = chat_pb2.GetRequestRequest(request_id=request_id)
    return await replicas.stubs[router].GetRequest(request, metadata=key)


async def cancel(replicas, router, request_id, key=MINE):
    request = chat_pb2.CancelRequestRequest(request_id=request_id)
    return await replicas.stubs[router].CancelRequest(request, metadata=key)


def let_run(replicas):
    replicas.gates[0].let_through(2000)


async def steps_done(replicas, count):
    """So many have been computed, and the next one waits."""
    load = replicas.workers[0].state
    await until(lambda: load().load.step_count >= count and replicas.gates[0].holds_one)


async def in_prefill(replicas):
    reading = Reading(replicas, LONG)
    replicas.gates[0].let_through(1)
    await steps_done(replicas, 1)
    return reading


async def in_decode(replicas):
    reading = Reading(replicas)
    replicas.gates[0].let_through(5)
    await steps_done(replicas, 5)
    return reading


async def at_the_worker_before_its_first_step(replicas):
    await in_decode(replicas)
    reading = Reading(replicas)
    await until(lambda: replicas.workers[0].state().live_submits == 2)
    return reading


async def in_the_queue(replicas):
    await at_the_worker_before_its_first_step(replicas)
    reading = Reading(replicas)
    await until(lambda: replicas.routers[0].held()["permits"] == 1)
    return reading


RUNNING, QUEUED = chat_pb2.REQUEST_STATE_RUNNING, chat_pb2.REQUEST_STATE_QUEUED
PHASES = [
    (in_the_queue, QUEUED),
    (at_the_worker_before_its_first_step, RUNNING),
    (in_prefill, RUNNING),
    (in_decode, RUNNING),
]


@pytest.mark.parametrize(("begin", "state"), PHASES, ids=lambda v: getattr(v, "__name__", ""))
async def test_it_is_told_of_and_cancelled_from_the_other_router(replicas, begin, state):
    """Its own router tells the same; nothing of it stays, and its row says what became of it."""
    reading = await begin(replicas)
    request_id = await reading.request_id()
    told = await record(replicas, 1, request_id)
    here = await record(replicas, 0, request_id)
    assert (told.state, told.model) == (here.state, here.model) == (state, "demo")
    for _ in range(2):
        await cancel(replicas, 1, request_id)
    assert await reading.task is grpc.StatusCode.CANCELLED
    for router in (1, 0):
        await cancel(replicas, router, request_id)
        after = await record(replicas, router, request_id)
        assert after.state == chat_pb2.REQUEST_STATE_CANCELLED
        assert after.timeline.reason == common_pb2.REASON_CANCELLED


async def test_what_a_tenant_does_not_have_answers_alike_whatever_it_is(replicas):
    """Another's, one that never was, a dead router's, nonsense: nothing happens to any."""
    reading = await in_decode(replicas)
    request_id = await reading.request_id()
    router = request_id.split("-")[1]
    strange = [
        (request_id, OTHERS),
        (f"req-{router}-{'0' * 32}", MINE),
        (f"req-00000000-{'0' * 32}", MINE),
        (f"req-{router}-*", MINE),
        ("", MINE),
        ("네" * 40, MINE),
    ]
    seen = set()
    for asked, key in strange:
        for ask in (record, cancel):
            for at in (0, 1):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(replicas, at, asked, key)
                seen.add((caught.value.code(), caught.value.details()))
    assert seen == {(grpc.StatusCode.NOT_FOUND, "request_id: no such request")}
    assert (await record(replicas, 1, request_id)).state == RUNNING
    let_run(replicas)
    assert await reading.task is grpc.StatusCode.OK


async def test_the_record_of_an_ended_request_outlives_its_router(replicas):
    """It is told to its tenant alone, a late cancel of it is harmless, and it expires."""
    reading = Reading(replicas, max_tokens=3)
    let_run(replicas)
    assert await reading.task is grpc.StatusCode.OK
    request_id = await reading.request_id()
    told = await record(replicas, 0, request_id)
    await replicas.stop_router(0)
    for _ in range(2):
        assert await record(replicas, 1, request_id) == told
        await cancel(replicas, 1, request_id)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await record(replicas, 1, request_id, OTHERS)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    client = replicas.routers[1]._store.shared.connection.client
    assert 0 < await client.pttl(f"noria:record:{request_id}") <= 3600_000


async def test_routers_hear_each_other_again_after_their_connections_are_cut(replicas):
    """RDS-01: within two seconds, and nothing else has to happen first."""
    reading = await in_decode(replicas)
    request_id = await reading.request_id()
    client = replicas.store.shared.connection.client
    names = [f"noria:router:{router._instance_id}" for router in replicas.routers]
    for _ in range(1000):
        if all(heard for _, heard in await client.pubsub_numsub(*names)):
            break
        await asyncio.sleep(0.005)
    assert await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub") == 2
    assert (await record(replicas, 1, request_id)).state == RUNNING
    await cancel(replicas, 1, request_id)
    assert await reading.task is grpc.StatusCode.CANCELLED
