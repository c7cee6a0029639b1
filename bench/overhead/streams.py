"""Clients that ask again as soon as they are answered, and note when each token came."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import grpc

from noria.client.connection import channel_options, key_metadata
from noria.v1 import chat_pb2, chat_pb2_grpc

PIECE = " a"


@dataclass(slots=True)
class Answer:
    """One request: when it was sent, and for each message when it came and how many tokens
    had come with it. Times are of the computer's monotonic clock, in seconds.
    """

    request_id: str = ""
    sent_at: float = 0.0
    messages: list[tuple[float, int]] = field(default_factory=list)


async def ask_all(
    address: str, key: str, *, streams: int, requests: int, output_tokens: int
) -> list[Answer]:
    """`requests` of them, `streams` at a time. Raises grpc.aio.AioRpcError."""
    async with grpc.aio.insecure_channel(address, options=channel_options(address)) as channel:
        stub = chat_pb2_grpc.ChatServiceStub(channel)
        numbers, answers = iter(range(requests)), list[Answer]()

        async def one_after_another() -> None:
            for number in numbers:
                answers.append(await _ask(stub, key, number, output_tokens))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(streams, requests)):
                group.create_task(one_after_another())
    return answers


async def _ask(
    stub: "chat_pb2_grpc.ChatServiceAsyncStub", key: str, number: int, output_tokens: int
) -> Answer:
    spec = chat_pb2.ChatSpec(max_tokens=output_tokens)
    spec.messages.add(role=chat_pb2.ROLE_USER).content.add().text.text = f"{number} times"
    spec.sampling.ignore_eos = True
    answer, letters = Answer(sent_at=time.monotonic()), 0
    call = stub.StreamChat(chat_pb2.StreamChatRequest(spec=spec), metadata=key_metadata(key))
    async for response in call:
        event = response.event
        kind = event.WhichOneof("event")
        if kind == "content_block_delta":
            letters += len(event.content_block_delta.text)
            answer.messages.append((time.monotonic(), letters // len(PIECE)))
        elif kind == "message_start":
            answer.request_id = event.message_start.request_id
    return answer


@dataclass(frozen=True, slots=True)
class Added:
    """What lay between worker and client, in seconds: until the first token, and to each."""

    first_s: list[float]
    token_s: list[float]
    num_messages: int
    num_tokens: int
    wall_s: float


def added(answers: Sequence[Answer], emitted: Mapping[str, Sequence[float]]) -> Added:
    """Compare what clients saw with what the worker noted.

    Until the first token: from sending to receiving, less the time that the worker held the
    request. To each token: from its leaving the worker to its message's arrival.
    Raises ValueError if a stream brought other than what left for it.
    """
    first, token = [], []
    for answer in answers:
        arrived, *left = emitted[answer.request_id]
        if answer.messages[-1][1] != len(left):
            raise ValueError(f"{len(left)} tokens left, {answer.messages[-1][1]} arrived")
        first.append(answer.messages[0][0] - answer.sent_at - (left[0] - arrived))
        token += list(_delays(answer, left))
    ends = [answer.messages[-1][0] for answer in answers]
    messages = sum(len(answer.messages) for answer in answers)
    wall = max(ends) - min(answer.sent_at for answer in answers)
    return Added(first, token, messages, len(token), wall)


def _delays(answer: Answer, left: Sequence[float]) -> Iterator[float]:
    done = count()
    at = next(done)
    for came_at, tokens in answer.messages:
        while at < tokens:
            yield came_at - left[at]
            at = next(done)
