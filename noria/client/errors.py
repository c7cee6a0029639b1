"""What a call to Noria can end with: one exception class per `Reason`.

Each class says what to do about it. Statuses that carry no reason of Noria's
(a connection that failed, a deadline kept by the client itself) are placed by
their gRPC code.
"""

from typing import ClassVar

import grpc

from noria.reasons import Reason
from noria.v1 import common_pb2


class NoriaError(Exception):
    """A call that was not served.

    `message` is for people; `request_id` is the router's id of the request, empty
    if the call never reached it; `fields` holds (field path, what is wrong) pairs
    for bad input; `retry_after_s` is the server's advice, absent if it gave none.
    `timeline` tells how far the request came, where the server said so: it does once
    the key is known, unless the call ended on this side. None of these ever holds
    text of a prompt or a reply.
    """

    reason: ClassVar[Reason | None] = None

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        request_id: str = "",
        fields: tuple[tuple[str, str], ...] = (),
        retry_after_s: float | None = None,
        timeline: common_pb2.Timeline | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.request_id = request_id
        self.fields = fields
        self.retry_after_s = retry_after_s
        self.timeline = timeline

    def __str__(self) -> str:
        name = self.reason.value if self.reason else self.code.name
        request = f" (request {self.request_id})" if self.request_id else ""
        return f"{name}: {self.message}{request}"


class UnreachableError(NoriaError):
    """No server answers at the address. Check it, start the server, try again later."""


class BadRequestError(NoriaError):
    """The request itself: the same request never passes. Change it."""


class InvalidFieldError(BadRequestError):
    """A field is missing, malformed or outside its range: correct what `fields` names."""

    reason = Reason.INVALID_FIELD


class MessageTooLargeError(BadRequestError):
    """The request is larger than the method accepts: send less text."""

    reason = Reason.MESSAGE_TOO_LARGE


class ContextLengthExceededError(BadRequestError):
    """Prompt and `max_tokens` exceed the model's context: shorten either."""

    reason = Reason.CONTEXT_LENGTH_EXCEEDED


class LimitUnattainableError(BadRequestError):
    """The request is larger than a whole limit: shorten it or have the limit raised."""

    reason = Reason.LIMIT_UNATTAINABLE


class UnsupportedError(BadRequestError):
    """A field that this server or model does not honour: leave out what `fields` names."""

    reason = Reason.UNSUPPORTED


class ModelNotFoundError(BadRequestError):
    """No such model is served: choose another name, or none for the only one."""

    reason = Reason.MODEL_NOT_FOUND


class RequestNotFoundError(BadRequestError):
    """No such request of yours is known: it may have ended already."""

    reason = Reason.REQUEST_NOT_FOUND


class KeyNotFoundError(BadRequestError):
    """No such key is known: `noria keys list` shows those that are."""

    reason = Reason.KEY_NOT_FOUND


class TooManyKeysError(BadRequestError):
    """The tenant has two live keys: revoke one of them, or let one expire, first."""

    reason = Reason.TOO_MANY_KEYS


class AccessError(NoriaError):
    """The key does not allow this. Use another key or have its rights changed."""


class InvalidKeyError(AccessError):
    """The key is missing or unknown: pass `api_key`, or set NORIA_API_KEY."""

    reason = Reason.INVALID_KEY


class ModelForbiddenError(AccessError):
    """The key may not use this model: choose another model or key."""

    reason = Reason.MODEL_FORBIDDEN


class MethodForbiddenError(AccessError):
    """The key may not call this method: use another key."""

    reason = Reason.METHOD_FORBIDDEN


class KeyRevokedError(AccessError):
    """The key was revoked while the request ran: use another key, and ask who revoked it."""

    reason = Reason.KEY_REVOKED


class LimitError(NoriaError):
    """Too much at the moment. The same request may pass after `retry_after_s` seconds."""


class QueueFullError(LimitError):
    """The server's queue is full: retry after `retry_after_s`, with fewer at once."""

    reason = Reason.QUEUE_FULL


class RequestsPerMinuteError(LimitError):
    """Your requests per minute are used up: retry after `retry_after_s`."""

    reason = Reason.REQUESTS_PER_MINUTE


class TokensPerMinuteError(LimitError):
    """Your tokens per minute are used up: retry after `retry_after_s`, or ask for fewer."""

    reason = Reason.TOKENS_PER_MINUTE


class ConcurrentRequestsError(LimitError):
    """You have too many requests running: wait until one of them ends."""

    reason = Reason.CONCURRENT_REQUESTS


class ConcurrentEncodesError(LimitError):
    """You have too many prompts being tokenized: send fewer at once."""

    reason = Reason.CONCURRENT_ENCODES


class QueueShareError(LimitError):
    """Your share of the queue is full: wait until one of your requests is served."""

    reason = Reason.QUEUE_SHARE


class SlowReaderError(LimitError):
    """The stream was left unread for too long: read it as it comes, work on it elsewhere."""

    reason = Reason.SLOW_READER


class DeadlineExceededError(NoriaError):
    """The deadline passed: pass a longer `timeout`, or ask for fewer tokens."""

    reason = Reason.DEADLINE_EXCEEDED


class RequestCancelledError(NoriaError):
    """The request was cancelled, by you or by another call with its id: nothing to do."""

    reason = Reason.CANCELLED


class ServiceError(NoriaError):
    """The server cannot do it now. Retry with growing pauses."""


class NoWorkerError(ServiceError):
    """No worker serves the model right now: retry, or start one."""

    reason = Reason.NO_WORKER


class NoTokenizerError(ServiceError):
    """No tokenizer serves the model right now: retry, or start one."""

    reason = Reason.NO_TOKENIZER


class WorkerLostError(ServiceError):
    """The worker died during the answer: what came is a part of it. Ask again."""

    reason = Reason.WORKER_LOST


class TokenizerLostError(ServiceError):
    """The tokenizer died during the answer: what came is a part of it. Ask again."""

    reason = Reason.TOKENIZER_LOST


class VocabularyMismatchError(ServiceError):
    """Worker and tokenizer hold different vocabularies: the operator must correct it."""

    reason = Reason.VOCABULARY_MISMATCH


class DrainingError(ServiceError):
    """This server is stopping: retry, on another one."""

    reason = Reason.DRAINING


class StoreUnavailableError(ServiceError):
    """The server cannot look up what it has to know, such as this key: retry later."""

    reason = Reason.STORE_UNAVAILABLE


class InternalError(ServiceError):
    """A defect in Noria: report it with the request id."""

    reason = Reason.INTERNAL


def _leaves(cls: type[NoriaError]) -> list[type[NoriaError]]:
    below = cls.__subclasses__()
    return [cls] if not below else [leaf for sub in below for leaf in _leaves(sub)]


ERROR_OF: dict[Reason, type[NoriaError]] = {
    leaf.reason: leaf for leaf in _leaves(NoriaError) if leaf.reason is not None
}
