"""Health, reflection and keys as an operator relies on them."""

import asyncio
import contextlib
import time

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from noria.reasons import Reason
from noria.service.errors import DETAILS_KEY, parse_status_details
from tests.support.stack import API_KEY, running_stack
from tests.support.waiting import until
from tests.support.worker_client import StepGate, worker_client
from worker import app as worker_app
from worker.config import WorkerConfig

NAMES = ("noria.v1.ChatService", "noria.v1.TokenizerService", "noria.v1.WorkerService")
OPEN = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
STATUS = health_pb2.HealthCheckResponse.ServingStatus


@pytest.fixture
async def stack(golden_model, script_file):
    script = script_file(mean_output_tokens=0, step_seconds=0.002, token_ids=[32, 127])
    async with running_stack(
        golden_model, script=script, router={"max_queued_requests": 8}, max_num_seqs=2
    ) as running:
        yield running


async def health(channel, name):
    request = health_pb2.HealthCheckRequest(service=name)
    answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
    return STATUS.Name(answer.status)


async def test_every_service_answers_for_its_own_name_and_for_live(stack):
    for name, address in zip(NAMES, stack.addresses, strict=True):
        async with grpc.aio.insecure_channel(address) as channel:
            assert [await health(channel, each) for each in ("", name, "live")] == ["SERVING"] * 3
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health(channel, "noria.v1.NoService")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_is_quick_and_live_while_batch_and_queue_are_full(stack):
    """p99 of 100 checks within 250 ms; a full queue is no reason to restart anything."""
    gate = StepGate(stack.workers[0].runner)
    asking = [asyncio.create_task(stack.client.chat(f"q{n}", max_tokens=100)) for n in range(11)]
    await until(lambda: stack.router.held()["permits"] == 8 and gate.holds_one)
    gate.let_through(10_000)
    times = []
    async with contextlib.AsyncExitStack() as held:
        channels = [
            await held.enter_async_context(grpc.aio.insecure_channel(address))
            for address in stack.addresses
        ]
        for _ in range(100):
            for channel in channels:
                asked = time.monotonic()
                assert await health(channel, "live") == "SERVING"
                times.append(time.monotonic() - asked)
    assert sorted(times)[int(len(times) * 0.99)] < 0.25
    assert not all(task.done() for task in asking)
    assert {answer.usage.output_tokens for answer in await asyncio.gather(*asking)} == {100}


async def test_live_fails_while_the_step_loop_is_frozen_and_not_before(
    golden_model, script_file, monkeypatch
):
    """With work that goes on it holds, however much there is."""
    monkeypatch.setattr(worker_app, "STEP_LIMIT_S", 0.5)
    monkeypatch.setattr(worker_app, "WATCH_S", 0.02)
    config = WorkerConfig(
        golden_model, "demo", "127.0.0.1:0", script=script_file(mean_output_tokens=0)
    )
    async with worker_app.running_worker(config) as worker, contextlib.AsyncExitStack() as held:
        facts = await worker.ready()
        client = await held.enter_async_context(worker_client(worker.address))
        channel = await held.enter_async_context(grpc.aio.insecure_channel(worker.address))
        await client.generate([40, 41], 50)
        assert await health(channel, "live") == "SERVING"
        gate = StepGate(facts.runner)
        number = await client.submit([40, 41], 5)
        await becomes(channel, "NOT_SERVING")
        # Ready is another question: the router finds out by the step's age.
        assert await health(channel, "") == "SERVING"
        gate.let_through(100)
        await client.finished(number)
        await becomes(channel, "SERVING")


async def becomes(channel, status):
    watching = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service="live")
    )
    async with asyncio.timeout(5):
        while STATUS.Name((await watching.read()).status) != status:
            pass
    watching.cancel()


async def services_of(channel):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = await reflect(channel, request)
    return [service.name for service in answer.list_services_response.service]


async def methods_of(channel, service):
    """The full names of a service's methods."""
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)
    answer = await reflect(channel, request)
    for raw in answer.file_descriptor_response.file_descriptor_proto:
        file = descriptor_pb2.FileDescriptorProto.FromString(raw)
        for each in file.service:
            if f"{file.package}.{each.name}" == service:
                return [f"/{service}/{method.name}" for method in each.method]
    raise AssertionError(f"reflection does not know {service}")


async def reflect(channel, request):
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await call.write(request)
    await call.done_writing()
    return await call.read()


WRONG = [
    (),
    (("authorization", "Bearer wrong"),),
    (("x-api-key", "wrong"),),
    (("x-api-key", ""),),
    (("x-api-key", API_KEY), ("authorization", "Bearer wrong")),
    (("authorization", f"Basic {API_KEY}"),),
]


async def test_every_method_of_the_router_but_health_and_reflection_needs_a_key(stack):
    """SEC-03: all of them, as reflection lists them, with no key and with wrong ones of both
    kinds.
    """
    async with grpc.aio.insecure_channel(stack.addresses[0]) as channel:
        services = await services_of(channel)
        asking = set(services) - set(OPEN)
        assert asking == {"noria.v1.ChatService", "noria.v1.AdminService"}
        methods = [method for each in asking for method in await methods_of(channel, each)]
        assert len(methods) >= 19
        for method in methods:
            for metadata in WRONG:
                error = await refused(channel, method, metadata)
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED, method
                details = parse_status_details(dict(error.trailing_metadata())[DETAILS_KEY])
                assert details.reason is Reason.INVALID_KEY
            error = await refused(channel, method, (("x-api-key", API_KEY),))
            assert error is None or error.code() is not grpc.StatusCode.UNAUTHENTICATED
    assert set(stack.held().values()) == {0}


@pytest.mark.parametrize(
    "method",
    [
        "/noria.v1.ChatService/streamchat",
        "//noria.v1.ChatService/Chat",
        "/noria.v1.ChatService/Chat/",
        "/noria.v1.TokenizerService/EncodeChat",
        "/noria.v1.WorkerService/Session",
        "/",
    ],
)
async def test_no_other_name_reaches_a_method(stack, method):
    async with grpc.aio.insecure_channel(stack.addresses[0]) as channel:
        error = await refused(channel, method, (("x-api-key", API_KEY),))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def refused(channel, method, metadata):
    """How a call with an empty message ends; None if it is served."""
    call = channel.unary_stream(method)(b"", metadata=metadata, timeout=5)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    return None
