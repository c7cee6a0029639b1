"""A call that is cancelled at any of its awaits leaves nothing behind."""

import pytest
import structlog

from noria.v1 import chat_pb2
from router.servicer import ChatServicer
from tests.router.fakes import bearer, events, kinds, routed, spec
from tests.support.suspensions import Suspensions, for_each

COMPLETION = chat_pb2.CompletionSpec(text="hi")
REQUESTS = {
    "StreamChat": chat_pb2.StreamChatRequest(spec=spec(stop_sequences=["zz"])),
    "Chat": chat_pb2.ChatRequest(spec=spec()),
    "StreamCompletion": chat_pb2.StreamCompletionRequest(spec=COMPLETION),
    "Completion": chat_pb2.CompletionRequest(spec=COMPLETION),
    "CountTokens": chat_pb2.CountTokensRequest(spec=spec()),
    "EstimateChat": chat_pb2.EstimateChatRequest(spec=spec()),
}
# How often a call waits at least: for its metadata, for ids, for tokens, for each write.
AWAITS = {"StreamChat": 8, "StreamCompletion": 8, "Chat": 3, "Completion": 3}


@pytest.mark.parametrize("method", REQUESTS)
async def test_cancelled_at_any_await_nothing_is_held_and_the_next_is_served(method, monkeypatch):
    """One log line each, too; whether the request waits for ids, room, tokens or the client."""
    suspensions = Suspensions(monkeypatch)
    suspensions.watch_call(ChatServicer, method)
    calls = 0

    with structlog.testing.capture_logs() as lines:
        async with routed() as setup:
            setup.worker.auto = [10, 11, 12]

            def ask():
                call = getattr(setup.stub, method)(REQUESTS[method], metadata=bearer(), timeout=20)
                return call, events(call) if hasattr(call, "read") else finished(call)

            async def check():
                nonlocal calls
                await setup.at_rest()
                assert kinds(await events(setup.stream()))[-1] == "message_stop"
                calls += 2

            awaits = await for_each(suspensions, ask, check)
    outcomes = [line["outcome"] for line in lines if line["event"] == "request"]
    assert awaits >= AWAITS.get(method, 2)
    assert len(outcomes) == calls
    assert set(outcomes) == {"SERVED", "CANCELLED"}
    assert not [line for line in lines if line["event"] == "defect"]


async def finished(call):
    await call
