"""Requests whose bytes are no message: refused like any bad field, once their caller is known.

gRPC alone would answer UNKNOWN, with an exception's name, before the service hears of the call:
no request id, no log line, no count.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from noria.reasons import invalid_field

Find = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class MalformedRequest:
    """Stands where a message would; whoever looks at a field of it refuses the request."""

    def __getattr__(self, name: str) -> NoReturn:
        problem = "bytes that are no message of this method, or a text that is no UTF-8"
        raise invalid_field("request", problem)


class MalformedRequests(grpc.aio.ServerInterceptor):
    """Gives handlers of a single request a `MalformedRequest` where there is no message."""

    async def intercept_service(self, continuation: Find, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        return handler._replace(request_deserializer=_lenient(handler.request_deserializer))


def _lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_stand_in(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return MalformedRequest()

    return parse_or_stand_in
