"""A bare router for tokenizer tests: calls, and decode sessions with all they sent back."""

import asyncio
import contextlib

import grpc

from noria.service.channel import CLIENT_OPTIONS
from noria.v1 import chat_pb2, tokenizer_pb2, tokenizer_pb2_grpc


def chat_spec(*turns, **fields):
    """A spec of (role, text) pairs, or plain texts of the user."""
    roles = {
        "system": chat_pb2.ROLE_SYSTEM,
        "user": chat_pb2.ROLE_USER,
        "assistant": chat_pb2.ROLE_ASSISTANT,
    }
    pairs = [("user", turn) if isinstance(turn, str) else turn for turn in turns]
    messages = [
        chat_pb2.Message(
            role=roles[role],
            content=[chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text=text))],
        )
        for role, text in pairs
    ]
    return chat_pb2.ChatSpec(messages=messages, **fields)


@contextlib.asynccontextmanager
async def tokenizer_stub(address):
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        yield tokenizer_pb2_grpc.TokenizerServiceStub(channel)


async def encode_chat(stub, *turns, **fields):
    request = tokenizer_pb2.EncodeChatRequest(spec=chat_spec(*turns, **fields))
    return list((await stub.EncodeChat(request)).prompt_token_ids)


class DecodeClient:
    """One decode session; `texts[slot]` are the texts that came, `draining` whether asked."""

    def __init__(self, call):
        self.call = call
        self.texts = {}
        self.draining = False
        self._arrived = asyncio.Condition()

    async def open(self, slot, **options):
        options.setdefault("skip_special_tokens", True)
        opened = tokenizer_pb2.DecodeOpen(slot=slot, **options)
        await self.call.write(tokenizer_pb2.DecodeSessionRequest(open=opened))

    async def feed(self, slot, *ids, **wanted):
        delta = tokenizer_pb2.DecodeDelta(slot=slot, token_ids=ids, **wanted)
        batch = tokenizer_pb2.DecodeBatch(deltas=[delta])
        await self.call.write(tokenizer_pb2.DecodeSessionRequest(batch=batch))

    async def close(self, slot, *, flush=True):
        closed = tokenizer_pb2.DecodeClose(slot=slot, flush=flush)
        await self.call.write(tokenizer_pb2.DecodeSessionRequest(close=closed))

    def text(self, slot):
        return "".join(text.text for text in self.texts.get(slot, []))

    async def until(self, condition):
        """Wait until something that came makes `condition()` true."""
        async with self._arrived:
            await self._arrived.wait_for(condition)

    async def closed(self, slot):
        """Wait for the slot's last text, and give it."""
        await self.until(lambda: any(text.closed for text in self.texts.get(slot, [])))
        return self.texts[slot][-1]

    async def read(self):
        async for response in self.call:
            async with self._arrived:
                self.draining = self.draining or response.HasField("draining")
                for text in response.batch.texts:
                    self.texts.setdefault(text.slot, []).append(text)
                self._arrived.notify_all()


@contextlib.asynccontextmanager
async def decode_client(stub):
    client = DecodeClient(stub.DecodeSession())
    reading = asyncio.create_task(client.read())
    try:
        yield client
    finally:
        reading.cancel()
        client.call.cancel()
        await asyncio.wait({reading})
