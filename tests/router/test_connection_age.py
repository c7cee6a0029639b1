"""Clients look for new routers now and then, and lose no stream over it."""

import asyncio

from noria.v1 import chat_pb2
from router.calls import Calls
from tests.router.fakes import EOS, bearer, events, next_event, routed


async def test_a_connection_is_renewed_and_its_streams_stay(monkeypatch):
    """GRP-07: new calls come over a new connection; one from before ends when it is served."""
    peers = []
    tenant_of = Calls._tenant

    def noting(calls, context):
        peers.append(context.peer())
        return tenant_of(calls, context)

    monkeypatch.setattr(Calls, "_tenant", noting)
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
