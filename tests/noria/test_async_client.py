"""The asynchronous client has the same surface and the same rules."""

import asyncio
import inspect

import pytest

import noria
from noria import AsyncClient, Client
from noria.client.stream import AsyncChatStream, ChatStream
from noria.reasons import Reason, RequestError
from tests.noria.fake_chat import REQUEST_ID, refuse
from tests.support.waiting import until


@pytest.fixture
async def client(chat_service):
    async with AsyncClient(chat_service.address, api_key="k", timeout=20, retry=False) as client:
        yield client


async def read_all(client, **options):
    async with client.stream_chat("q", **options) as stream:
        return [piece async for piece in stream]


def public(cls):
    return {name for name in dir(cls) if not name.startswith("_")}


def test_both_flavours_have_the_same_surface():
    assert public(Client) == public(AsyncClient)
    assert public(ChatStream) == public(AsyncChatStream)
    for name in ("stream_chat", "chat", "complete", "cancel", "__init__"):
        mine, theirs = (inspect.signature(getattr(c, name)) for c in (Client, AsyncClient))
        assert mine.parameters == theirs.parameters


async def test_a_stream_gives_pieces_and_then_the_result(client):
    async with client.stream_chat("q") as stream:
        assert stream.request_id == REQUEST_ID
        assert [piece async for piece in stream] == ["Yes", ",", " it is."]
    assert stream.result == await client.chat("q")


async def test_leaving_the_block_early_cancels_the_call(chat_service, client):
    chat_service.hold("a")
    async with client.stream_chat("q") as stream:
        async for _ in stream:
            break
    assert await asyncio.to_thread(chat_service.ended.wait, 20)


async def test_a_cancelled_task_cancels_its_call(chat_service, client):
    chat_service.hold("a")
    reading = asyncio.Event()

    async def read():
        async with client.stream_chat("q") as stream:
            async for _ in stream:
                reading.set()

    task = asyncio.create_task(read())
    await reading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(chat_service.ended.wait, 20)


async def test_cancel_ends_the_stream_for_its_reader(chat_service, client):
    chat_service.hold("a")
    async with client.stream_chat("q") as stream:
        pieces = aiter(stream)
        await anext(pieces)
        stream.cancel()
        with pytest.raises(noria.RequestCancelledError):
            await anext(pieces)


@pytest.mark.parametrize("kind", ["chat", "stream"])
async def test_closing_the_client_ends_its_calls_with_a_typed_error(chat_service, client, kind):
    """Whoever waits for the answer was not cancelled himself."""

    async def use():
        if kind == "chat":
            await client.chat("q")
        else:
            await read_all(client)

    chat_service.hold()
    using = asyncio.create_task(use())
    await until(lambda: chat_service.metadata)
    await client.close()
    with pytest.raises(noria.RequestCancelledError):
        await using
    chat_service.ended.set()


async def test_cancel_by_id_names_the_request(chat_service, client):
    await client.cancel("req-9")
    assert chat_service.cancelled_ids == ["req-9"]


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.CANCELLED, Reason.NO_WORKER])
async def test_refusals_are_typed(chat_service, client, reason):
    error = RequestError(reason, "why", retry_after_s=1.5)
    chat_service.events = lambda _spec, context: refuse(context, error)
    with pytest.raises(noria.NoriaError) as caught:
        await read_all(client)
    with pytest.raises(noria.NoriaError) as unary:
        await client.chat("q")
    for raised in (caught.value, unary.value):
        assert (raised.reason, raised.request_id) == (reason, REQUEST_ID)
        assert raised.retry_after_s == 1.5


async def test_a_deadline_that_passes_is_a_typed_error(chat_service, client):
    chat_service.hold()
    with pytest.raises(noria.DeadlineExceededError):
        await read_all(client, timeout=0.3)


async def test_nobody_at_the_address_is_said_as_such():
    async with AsyncClient("127.0.0.1:1", timeout=20) as client:
        with pytest.raises(noria.UnreachableError):
            await read_all(client)


def test_a_client_may_be_made_before_there_is_a_loop(chat_service):
    made_outside = AsyncClient(chat_service.address)
    assert inspect.iscoroutinefunction(made_outside.chat)
