"""A call of the tokenizer that is cancelled at any of its awaits leaves nothing behind."""

import asyncio
import contextlib

import grpc
import pytest

from noria.v1 import tokenizer_pb2
from tests.support.suspensions import LoopSuspensions, Suspensions, for_each
from tests.support.tokenizer_client import chat_spec, decode_client, encode_chat, tokenizer_stub
from tests.support.waiting import until
from tokenizer_svc import decode_session
from tokenizer_svc.app import running_tokenizer
from tokenizer_svc.config import TokenizerConfig
from tokenizer_svc.servicer import TokenizerServicer

REQUESTS = {
    "EncodeChat": tokenizer_pb2.EncodeChatRequest(spec=chat_spec("토마토는 과일이야?")),
    "Encode": tokenizer_pb2.EncodeRequest(text="토마토"),
    "Decode": tokenizer_pb2.DecodeRequest(token_ids=[4512, 11]),
    "GetTokenizerInfo": tokenizer_pb2.GetTokenizerInfoRequest(),
}
YES = 4512


@pytest.fixture
async def served(golden_model, monkeypatch):
    """A stub, the servicer, and what watches its calls; the servicer has not failed."""
    made, failures = [], []
    start = TokenizerServicer.start

    def noting(servicer, text):
        made.append(servicer)
        start(servicer, text)

    monkeypatch.setattr(TokenizerServicer, "start", noting)
    suspensions = Suspensions(monkeypatch)
    for method in (*REQUESTS, "DecodeSession"):
        suspensions.watch_call(TokenizerServicer, method)
    for part in ("_read", "_write", "_watch"):
        suspensions.watch_part(decode_session, part)
    config = TokenizerConfig(golden_model, "golden", "127.0.0.1:0")
    async with running_tokenizer(config, on_failure=failures.append) as tokenizer:
        await tokenizer.ready()
        async with tokenizer_stub(tokenizer.address) as stub:
            yield stub, made[0], suspensions
    assert failures == []


@pytest.mark.parametrize("method", REQUESTS)
async def test_a_call_cancelled_at_any_await_is_forgotten(method, served):
    """Nothing is counted as open, and the next call is answered."""
    stub, servicer, suspensions = served

    def ask():
        call = getattr(stub, method)(REQUESTS[method], timeout=20)
        return call, answer_of(call)

    async def check():
        assert servicer.num_open == 0
        assert await encode_chat(stub, "네")

    await for_each(suspensions, ask, check)


async def test_a_session_cancelled_at_any_await_is_forgotten_with_its_slots(served):
    """While it reads, decodes, writes or waits; the next session decodes the same."""
    stub, servicer, suspensions = served

    def ask():
        call = stub.DecodeSession(timeout=20)
        return call, decoded(call)

    async def check():
        assert servicer.num_open == 0
        async with decode_client(stub) as session:
            await session.open(1)
            await session.feed(1, YES)
            await session.close(1)
            assert (await session.closed(1)).num_ids == 1
            assert session.text(1) == "네"

    assert await for_each(suspensions, ask, check) >= 6


@pytest.mark.parametrize(("part", "least"), [("_read", 4), ("_write", 4), ("_watch", 1)])
async def test_a_session_ends_with_whichever_of_its_parts_ends(part, least, served, monkeypatch):
    """A router that heard nothing more would wait for texts; so it opens its slots again."""
    stub, servicer, _ = served
    cut, cuts = LoopSuspensions(monkeypatch, decode_session, part), 0
    for number in range(1, least + 1):
        cut.cut_at(number)
        call = stub.DecodeSession(timeout=20)
        async with asyncio.timeout(10):
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await decoded(call)
        cuts += cut.hit
        cut.off()
        await until(lambda: servicer.num_open == 0)
        async with decode_client(stub) as session:
            await session.open(1)
            await session.feed(1, YES)
            await session.close(1)
            assert (await session.closed(1)).num_ids == 1
    assert cuts == least


async def answer_of(call):
    await call


async def decoded(call):
    """Two slots from their opening to the session's end, one message after the other."""
    for slot in (1, 2):
        opened = tokenizer_pb2.DecodeOpen(slot=slot)
        batch = tokenizer_pb2.DecodeBatch(
            deltas=[tokenizer_pb2.DecodeDelta(slot=slot, token_ids=[YES])]
        )
        closed = tokenizer_pb2.DecodeClose(slot=slot, flush=True)
        await call.write(tokenizer_pb2.DecodeSessionRequest(open=opened))
        await call.write(tokenizer_pb2.DecodeSessionRequest(batch=batch))
        await call.read()
        await call.write(tokenizer_pb2.DecodeSessionRequest(close=closed))
        await call.read()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
