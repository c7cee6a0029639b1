"""Long streams with `trace_steps`, read by a client that sets no gRPC options at all."""

import asyncio
import contextlib

import grpc
import pytest

from noria.client.decode import TIMELINE_KEY, error_of
from noria.client.decode import Metadata as Trailing
from noria.reasons import Reason
from noria.v1 import chat_pb2, chat_pb2_grpc, common_pb2
from tests.support.stack import API_KEY, running_stack
from tests.support.waiting import until

LETTERS = [32, 127]
KEY = (("authorization", f"Bearer {API_KEY}"),)


@pytest.fixture
async def stack(golden_model, script_file):
    script = script_file(mean_output_tokens=0, token_ids=LETTERS)
    async with running_stack(golden_model, script=script) as running:
        yield running


@contextlib.asynccontextmanager
async def bare_call(stack, max_tokens):
    """A traced call and its stub, over a channel with gRPC's own defaults."""
    message = chat_pb2.Message(role=chat_pb2.ROLE_USER)
    message.content.add().text.text = "네"
    spec = chat_pb2.ChatSpec(messages=[message], max_tokens=max_tokens, trace_steps=True)
    async with grpc.aio.insecure_channel(stack.router.address) as channel:
        stub = chat_pb2_grpc.ChatServiceStub(channel)
        yield stub.StreamChat(chat_pb2.StreamChatRequest(spec=spec), metadata=KEY), stub


async def read(call, max_records=None):
    """The events, at most until so many records have come; the records."""
    records, last = [], None
    async for response in call:
        last = response.event
        records += last.content_block_delta.steps
        if max_records is not None and len(records) >= max_records:
            break
    return records, last


async def test_two_thousand_traced_tokens_end_well(stack):
    async with bare_call(stack, 2_000) as (call, _):
        records, last = await read(call)
        assert await call.code() is grpc.StatusCode.OK
        trailing = Trailing.of(await call.trailing_metadata()).binary(TIMELINE_KEY)
    assert last.HasField("message_stop")
    assert len(records) == 2_000
    assert [r.kv_tokens for r in records] == [records[0].kv_tokens + i for i in range(2_000)]
    assert all(record.token_bytes for record in records)
    assert len(trailing) <= 2048
    assert common_pb2.Timeline.FromString(trailing).usage.output_tokens == 2_000
    await until(lambda: set(stack.held().values()) == {0})


async def test_a_client_that_reads_nothing_for_a_while_gets_all_of_it(stack):
    async with bare_call(stack, 2_000) as (call, _):
        await call.initial_metadata()
        await until(lambda: stack.workers[0].scheduler.num_steps >= 2_000)
        records, last = await read(call)
        assert await call.code() is grpc.StatusCode.OK
    assert (len(records), last.HasField("message_stop")) == (2_000, True)


async def test_one_cut_by_its_client_after_a_thousand_is_cancelled(stack):
    async with bare_call(stack, 3_000) as (call, _):
        records, _ = await read(call, 1_000)
        call.cancel()
        assert await call.code() is grpc.StatusCode.CANCELLED
    assert len(records) >= 1_000
    await until(lambda: set(stack.held().values()) == {0})
    assert stack.workers[0].scheduler.num_steps < 3_000


async def test_one_cut_by_its_id_after_a_thousand_says_so_and_how_far_it_came(stack):
    async with bare_call(stack, 3_000) as (call, stub):
        request_id = Trailing.of(await call.initial_metadata()).text("noria-request-id")
        await read(call, 1_000)
        cancel = chat_pb2.CancelRequestRequest(request_id=request_id)
        await stub.CancelRequest(cancel, metadata=KEY)
        with pytest.raises((grpc.RpcError, asyncio.CancelledError)):
            await read(call)
        code, trailing = await call.code(), Trailing.of(await call.trailing_metadata())
    error = error_of(code, await call.details(), trailing)
    assert (code, error.reason) == (grpc.StatusCode.CANCELLED, Reason.CANCELLED)
    assert error.request_id == error.timeline.request_id == request_id
    assert 1_000 <= error.timeline.usage.output_tokens < 3_000
    await until(lambda: set(stack.held().values()) == {0})
