"""Why a request was not served: one enum for wire, metrics, logs and docs.

Mirrors `noria.v1.Reason` (a test holds the two together), so that domain
modules can name a reason without importing protobuf.
"""

from enum import StrEnum


class Reason(StrEnum):
    """The name of a `noria.v1.Reason`, without its prefix."""

    INVALID_FIELD = "INVALID_FIELD"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    LIMIT_UNATTAINABLE = "LIMIT_UNATTAINABLE"
    UNSUPPORTED = "UNSUPPORTED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    REQUEST_NOT_FOUND = "REQUEST_NOT_FOUND"
    INVALID_KEY = "INVALID_KEY"
    MODEL_FORBIDDEN = "MODEL_FORBIDDEN"
    METHOD_FORBIDDEN = "METHOD_FORBIDDEN"
    KEY_REVOKED = "KEY_REVOKED"
    KEY_NOT_FOUND = "KEY_NOT_FOUND"
    TOO_MANY_KEYS = "TOO_MANY_KEYS"
    QUEUE_FULL = "QUEUE_FULL"
    REQUESTS_PER_MINUTE = "REQUESTS_PER_MINUTE"
    TOKENS_PER_MINUTE = "TOKENS_PER_MINUTE"
    CONCURRENT_REQUESTS = "CONCURRENT_REQUESTS"
    CONCURRENT_ENCODES = "CONCURRENT_ENCODES"
    QUEUE_SHARE = "QUEUE_SHARE"
    SLOW_READER = "SLOW_READER"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    NO_WORKER = "NO_WORKER"
    NO_TOKENIZER = "NO_TOKENIZER"
    WORKER_LOST = "WORKER_LOST"
    TOKENIZER_LOST = "TOKENIZER_LOST"
    VOCABULARY_MISMATCH = "VOCABULARY_MISMATCH"
    DRAINING = "DRAINING"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    INTERNAL = "INTERNAL"


class Retry(StrEnum):
    """What a caller may do about a request that was not served."""

    NO = "no"
    AFTER_DELAY = "after the delay in RetryInfo"
    WITH_BACKOFF = "with growing pauses"


# Whether the same request may pass later. A delay in RetryInfo, where the server knows one,
# comes before a caller's own pauses.
RETRY_OF: dict[Reason, Retry] = {
    Reason.INVALID_FIELD: Retry.NO,
    Reason.MESSAGE_TOO_LARGE: Retry.NO,
    Reason.CONTEXT_LENGTH_EXCEEDED: Retry.NO,
    Reason.LIMIT_UNATTAINABLE: Retry.NO,
    Reason.UNSUPPORTED: Retry.NO,
    Reason.MODEL_NOT_FOUND: Retry.NO,
    Reason.REQUEST_NOT_FOUND: Retry.NO,
    Reason.INVALID_KEY: Retry.NO,
    Reason.MODEL_FORBIDDEN: Retry.NO,
    Reason.METHOD_FORBIDDEN: Retry.NO,
    Reason.KEY_REVOKED: Retry.NO,
    Reason.KEY_NOT_FOUND: Retry.NO,
    Reason.TOO_MANY_KEYS: Retry.NO,
    Reason.QUEUE_FULL: Retry.AFTER_DELAY,
    Reason.REQUESTS_PER_MINUTE: Retry.AFTER_DELAY,
    Reason.TOKENS_PER_MINUTE: Retry.AFTER_DELAY,
    Reason.CONCURRENT_REQUESTS: Retry.AFTER_DELAY,
    Reason.CONCURRENT_ENCODES: Retry.AFTER_DELAY,
    Reason.QUEUE_SHARE: Retry.AFTER_DELAY,
    Reason.SLOW_READER: Retry.NO,
    Reason.DEADLINE_EXCEEDED: Retry.NO,
    Reason.CANCELLED: Retry.NO,
    Reason.NO_WORKER: Retry.WITH_BACKOFF,
    Reason.NO_TOKENIZER: Retry.WITH_BACKOFF,
    Reason.WORKER_LOST: Retry.WITH_BACKOFF,
    Reason.TOKENIZER_LOST: Retry.WITH_BACKOFF,
    Reason.VOCABULARY_MISMATCH: Retry.NO,
    Reason.DRAINING: Retry.WITH_BACKOFF,
    Reason.STORE_UNAVAILABLE: Retry.WITH_BACKOFF,
    Reason.INTERNAL: Retry.NO,
}


class RequestError(Exception):
    """A request that is not served: the reason, a message for people, what helps.

    `fields` holds (field path, what is wrong) pairs for bad input.
    `retry_after_s` says when the same request may pass.
    `quota` holds (subject, what was exceeded) for a limit.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        fields: tuple[tuple[str, str], ...] = (),
        retry_after_s: float | None = None,
        quota: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.fields = fields
        self.retry_after_s = retry_after_s
        self.quota = quota


def invalid_field(field: str, problem: str) -> RequestError:
    """The error for one bad field, named in both the message and the violation."""
    return RequestError(Reason.INVALID_FIELD, f"{field}: {problem}", fields=((field, problem),))
