"""Requests that are not parsed: refused like any bad field, once their caller is known.

gRPC alone parses whatever arrives before the service hears of the call. Bytes that are no
message would be answered UNKNOWN, with an exception's name and no request id; and a few
kilobytes that unpack to millions of empty messages would cost gigabytes, key or no key.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from noria.reasons import Reason, RequestError, invalid_field
from noria.service.limits import MAX_MESSAGE_BYTES

Find = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
# Why the caller of this method, with this metadata, may not have its request parsed.
Refusal = Callable[[str, Iterable[tuple[str, str | bytes]]], Awaitable[RequestError | None]]


class UnparsedRequest:
    """Stands where a message would; whoever looks at a field of it refuses the request."""

    def __init__(self, error: RequestError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error


class GuardedRequests(grpc.aio.ServerInterceptor):
    """Gives handlers an `UnparsedRequest` where nothing may be parsed, in sessions as well.

    Handlers find out who calls before they look at the request, so that one that was not
    parsed for want of a key is refused for that. A key that has become valid just between
    the two is refused as the unknown one that it was.
    """

    def __init__(
        self,
        max_bytes: int = MAX_MESSAGE_BYTES,
        refusal: Refusal | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._refusal = refusal

    async def intercept_service(self, continuation: Find, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        refusal = None
        if self._refusal is not None:
            refusal = await self._refusal(details.method, details.invocation_metadata or ())
        parse = self._guarded(handler.request_deserializer, refusal)
        return handler._replace(request_deserializer=parse)

    def _guarded(
        self, parse: Callable[[bytes], Any], refusal: RequestError | None
    ) -> Callable[[bytes], Any]:
        def parse_or_stand_in(data: bytes) -> Any:
            if refusal is not None:
                return UnparsedRequest(refusal)
            if len(data) > self._max_bytes:
                return UnparsedRequest(_too_large(len(data), self._max_bytes))
            try:
                return parse(data)
            except DecodeError:
                problem = "bytes that are no message of this method, or a text that is no UTF-8"
                return UnparsedRequest(invalid_field("request", problem))

        return parse_or_stand_in


def _too_large(size: int, limit: int) -> RequestError:
    problem = f"{size} bytes; at most {limit}"
    fields = (("request", problem),)
    return RequestError(Reason.MESSAGE_TOO_LARGE, f"request: {problem}", fields=fields)
