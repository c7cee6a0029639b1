"""From a failed RPC to the exception it stands for."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from noria.client.errors import (
    ERROR_OF,
    DeadlineExceededError,
    NoriaError,
    RequestCancelledError,
    UnreachableError,
)
from noria.reasons import Reason
from noria.service.errors import DETAILS_KEY, ERROR_DOMAIN
from noria.v1 import common_pb2

REQUEST_ID_KEY = "noria-request-id"
TIMELINE_KEY = "noria-timeline-bin"

# What a status means when no server of Noria's explained it.
_BY_CODE: dict[grpc.StatusCode, type[NoriaError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.UNAVAILABLE: UnreachableError,
}


@dataclass
class _Details:
    reason: Reason | None = None
    request_id: str = ""
    fields: tuple[tuple[str, str], ...] = ()
    retry_after_s: float | None = None


@dataclass(frozen=True)
class Metadata:
    """Initial or trailing metadata, as either flavour of grpc gives it."""

    values: dict[str, str | bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, pairs: Iterable[Any] | None) -> "Metadata":
        return cls({str(key): value for key, value in pairs or ()})

    def text(self, key: str) -> str:
        """The value as text; empty if it is absent."""
        value = self.values.get(key, "")
        return value.decode("ascii", "replace") if isinstance(value, bytes) else value

    def binary(self, key: str) -> bytes:
        """The value as bytes; empty if it is absent."""
        value = self.values.get(key, b"")
        return value if isinstance(value, bytes) else value.encode()


def _reason(name: str) -> Reason | None:
    return Reason(name) if name in Reason.__members__ else None


def _read(serialized: bytes) -> _Details:
    read = _Details()
    try:
        details = status_pb2.Status.FromString(serialized).details
    except DecodeError:
        return read
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in details:
        try:
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                read.reason = _reason(info.reason)
                read.request_id = info.metadata.get("request_id", "")
            elif detail.Unpack(bad):
                read.fields = tuple((v.field, v.description) for v in bad.field_violations)
            elif detail.Unpack(retry):
                read.retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        except (DecodeError, ValueError, OverflowError):
            continue
    return read


def _timeline(serialized: bytes) -> common_pb2.Timeline | None:
    try:
        return common_pb2.Timeline.FromString(serialized) if serialized else None
    except DecodeError:
        return None


def error_of(
    code: grpc.StatusCode, message: str, trailing: Metadata, request_id: str = ""
) -> NoriaError:
    """The exception for a status, its message and its trailing metadata.

    `request_id` is what the initial metadata said, for statuses that do not repeat it.
    """
    details = _read(trailing.binary(DETAILS_KEY))
    cls = _BY_CODE.get(code, NoriaError)
    if details.reason is not None:
        cls = ERROR_OF[details.reason]
    return cls(
        message or code.name.lower().replace("_", " "),
        code=code,
        request_id=details.request_id or trailing.text(REQUEST_ID_KEY) or request_id,
        fields=details.fields,
        retry_after_s=details.retry_after_s,
        timeline=_timeline(trailing.binary(TIMELINE_KEY)),
    )


def error_of_rpc(error: grpc.RpcError, request_id: str = "") -> NoriaError:
    """The exception for what a synchronous or asynchronous call raised."""
    call: Any = error
    return error_of(
        call.code(), call.details() or "", Metadata.of(call.trailing_metadata()), request_id
    )
