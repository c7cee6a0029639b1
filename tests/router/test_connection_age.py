"""Clients look for new routers now and then, and lose no stream over it."""

import asyncio
import contextlib

import grpc

from noria.client.connection import channel_options
from noria.v1 import chat_pb2, chat_pb2_grpc
from router.calls import Calls
from tests.router.fakes import EOS, bearer, events, next_event, routed, spec
from tests.support.name_server import name_server


async def test_a_connection_is_renewed_and_its_streams_stay(monkeypatch):
    """GRP-07: new calls come over a new connection; one from before ends when it is served."""
    peers = []
    key_of = Calls._key

    async def noting(calls, context):
        peers.append(context.peer())
        return await key_of(calls, context)

    monkeypatch.setattr(Calls, "_key", noting)
    async with routed(max_connection_age_s=0.2) as setup:
        call = setup.stream()
        await setup.submitted(1)
        setup.worker.emit(1, 10)
        while not (await next_event(call)).HasField("content_block_delta"):
            pass
        async with asyncio.timeout(5):
            while len(set(peers)) < 3:
                await setup.stub.ListModels(chat_pb2.ListModelsRequest(), metadata=bearer())
                await asyncio.sleep(0.02)
        setup.worker.finish(1, "eos", EOS)
        assert (await events(call))[-1].HasField("message_stop")


async def test_routers_that_come_and_go_under_a_name_are_found_and_left():
    """GRP-07: with the answer of the name server, at the age of a connection, within seconds;
    a stream goes on at the router that the name no longer stands for.
    """
    options = (*channel_options("127.0.0.1:1"), ("grpc.dns_min_time_between_resolutions_ms", 50))
    async with contextlib.AsyncExitStack() as held:
        names = await held.enter_async_context(name_server())
        first = await held.enter_async_context(routed(max_connection_age_s=0.3))
        port = first.router.address.rpartition(":")[2]
        second = await held.enter_async_context(
            routed(max_connection_age_s=0.3, listen=f"127.0.0.2:{port}")
        )
        names.addresses = ["127.0.0.1"]
        target = f"dns://127.0.0.1:{names.port}/routers.example:{port}"
        channel = await held.enter_async_context(grpc.aio.insecure_channel(target, options))
        stub = chat_pb2_grpc.ChatServiceStub(channel)
        call = stub.StreamChat(chat_pb2.StreamChatRequest(spec=spec()), metadata=bearer())
        await first.submitted(1)
        first.worker.auto = second.worker.auto = [10]
        names.addresses = ["127.0.0.1", "127.0.0.2"]
        await asked_until(stub, second, in_a_row=1)
        names.addresses = ["127.0.0.2"]
        await asked_until(stub, second, in_a_row=10)
        first.worker.finish(1, "eos", EOS)
        assert (await events(call))[-1].HasField("message_stop")


async def asked_until(stub, setup, in_a_row):
    """Ask until so many requests, one after the other, went to one router."""
    there = 0
    async with asyncio.timeout(10):
        while there < in_a_row:
            before = len(setup.worker.submits)
            await stub.Chat(chat_pb2.ChatRequest(spec=spec()), metadata=bearer())
            there = there + 1 if len(setup.worker.submits) > before else 0
