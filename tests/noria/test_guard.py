"""Nothing of a request is parsed before its caller is known and its size is allowed."""

import pytest

from noria.reasons import Reason, RequestError
from noria.service.guard import GuardedRequests
from noria.v1 import chat_pb2


class Details:
    method = "/noria.v1.ChatService/Chat"
    invocation_metadata = (("x-api-key", "k"),)


class Handler:
    """The part of gRPC's handler that the interceptor looks at."""

    request_streaming = False

    def __init__(self, parse):
        self.request_deserializer = parse

    def _replace(self, request_deserializer):
        return Handler(request_deserializer)


class Parser:
    def __init__(self):
        self.parsed = []

    def __call__(self, data):
        self.parsed.append(data)
        return chat_pb2.ChatRequest.FromString(data)


async def looked_at(guard, data, parser):
    async def find(details):
        return Handler(parser)

    handler = await guard.intercept_service(find, Details)
    return handler.request_deserializer(data)


async def test_a_known_callers_request_is_parsed():
    request = chat_pb2.ChatRequest(spec=chat_pb2.ChatSpec(model="m"))
    parsed = await looked_at(GuardedRequests(100), request.SerializeToString(), Parser())
    assert parsed == request


@pytest.mark.parametrize(
    ("refusal", "data", "reason", "says"),
    [
        (RequestError(Reason.INVALID_KEY, "unknown"), b"", Reason.INVALID_KEY, "unknown"),
        (None, b"x" * 101, Reason.MESSAGE_TOO_LARGE, "101 bytes; at most 100"),
    ],
)
async def test_what_may_not_be_parsed_is_not(refusal, data, reason, says):
    """Nor is the request of a key that became valid only after it was looked at."""
    parser = Parser()

    async def refused(method, metadata):
        return refusal

    guard = GuardedRequests(100, refused)
    request = await looked_at(guard, data, parser)
    assert parser.parsed == []
    with pytest.raises(RequestError, match=says) as caught:
        _ = request.spec
    assert caught.value.reason is reason


async def test_bytes_that_are_no_message_are_refused_by_whoever_looks():
    request = await looked_at(GuardedRequests(100), b"\xff\xff", Parser())
    with pytest.raises(RequestError, match="no message of this method"):
        _ = request.spec


async def test_the_guard_hears_method_and_metadata():
    heard = []

    async def note(method, metadata):
        heard.append((method, *metadata))

    guard = GuardedRequests(100, note)
    await looked_at(guard, b"", Parser())
    assert heard == [("/noria.v1.ChatService/Chat", ("x-api-key", "k"))]
