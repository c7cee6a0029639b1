"""RequestError on the wire: a gRPC status with `google.rpc` details."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from noria.reasons import Reason, RequestError

ERROR_DOMAIN = "noria"
DETAILS_KEY = "grpc-status-details-bin"

STATUS_OF: dict[Reason, grpc.StatusCode] = {
    Reason.INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.MESSAGE_TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.CONTEXT_LENGTH_EXCEEDED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.LIMIT_UNATTAINABLE: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.UNSUPPORTED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.REQUEST_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.INVALID_KEY: grpc.StatusCode.UNAUTHENTICATED,
    Reason.MODEL_FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Reason.METHOD_FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Reason.KEY_REVOKED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.KEY_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.TOO_MANY_KEYS: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.REQUESTS_PER_MINUTE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOKENS_PER_MINUTE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.CONCURRENT_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.CONCURRENT_ENCODES: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUEUE_SHARE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.SLOW_READER: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.NO_WORKER: grpc.StatusCode.UNAVAILABLE,
    Reason.NO_TOKENIZER: grpc.StatusCode.UNAVAILABLE,
    Reason.WORKER_LOST: grpc.StatusCode.UNAVAILABLE,
    Reason.TOKENIZER_LOST: grpc.StatusCode.UNAVAILABLE,
    Reason.VOCABULARY_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.STORE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}


class AbortableContext(Protocol):
    """The part of a grpc.aio servicer context that ends a call."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn: ...


def _details(error: RequestError, request_id: str) -> list[Message]:
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=ERROR_DOMAIN)
    if request_id:
        info.metadata["request_id"] = request_id
    details: list[Message] = [info]
    if error.fields:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=field, description=problem)
            for field, problem in error.fields
        ]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(timedelta(seconds=error.retry_after_s))
        details.append(retry)
    if error.quota is not None:
        violation = error_details_pb2.QuotaFailure.Violation(
            subject=error.quota[0], description=error.quota[1]
        )
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    return details


def status_details(error: RequestError, request_id: str = "") -> bytes:
    """The serialized `google.rpc.Status` of an error, for `grpc-status-details-bin`."""
    status = status_pb2.Status(code=STATUS_OF[error.reason].value[0], message=error.message)
    for detail in _details(error, request_id):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    serialized: bytes = status.SerializeToString()
    return serialized


async def abort(
    context: AbortableContext,
    error: RequestError,
    request_id: str = "",
    more: Iterable[tuple[str, bytes]] = (),
) -> NoReturn:
    """End the call with the error's status, message and details, and `more` metadata."""
    trailing = [(DETAILS_KEY, status_details(error, request_id)), *more]
    if request_id:
        trailing.append(("noria-request-id", request_id.encode()))
    await context.abort(STATUS_OF[error.reason], error.message, tuple(trailing))


def parse_status_details(serialized: bytes) -> RequestError | None:
    """The inverse of `status_details`, for a service that passes on what another refused.

    None if no service of Noria's made it. Raises DecodeError for bytes that are no status.
    """
    status = status_pb2.Status.FromString(serialized)
    info, bad, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    fields: tuple[tuple[str, str], ...] = ()
    retry_after_s = None
    for detail in status.details:
        if detail.Unpack(bad):
            fields = tuple((v.field, v.description) for v in bad.field_violations)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        else:
            detail.Unpack(info)
    if info.domain != ERROR_DOMAIN or info.reason not in Reason.__members__:
        return None
    reason = Reason(info.reason)
    return RequestError(reason, status.message, fields=fields, retry_after_s=retry_after_s)
