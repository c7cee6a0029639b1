"""The events of an answer as plain data, and how neighbours merge for a slow reader."""

from dataclasses import dataclass, field
from enum import Enum, auto


class StopReason(Enum):
    """Why an answer ended."""

    END_TURN = auto()
    MAX_TOKENS = auto()
    STOP_SEQUENCE = auto()


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens as they are charged; `output_tokens` includes the one that ended the output."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MessageStart:
    """The request has left the queue for a worker."""

    request_id: str
    model: str
    input_tokens: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class BlockStart:
    """The text block begins; a choice has exactly one, which may stay empty."""

    choice: int = 0


@dataclass(frozen=True, slots=True)
class TokenAlternative:
    """An id that was not chosen, its own bytes, and its natural log-probability."""

    token_id: int
    piece: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """An id, its own bytes and log-probability; likeliest alternatives first.

    The first id of a prompt has no log-probability.
    """

    token_id: int
    piece: bytes
    logprob: float | None
    alternatives: list[TokenAlternative]


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """The next ids of the prompt."""

    tokens: list[TokenInfo]
    choice: int = 0


@dataclass(slots=True)
class TextDelta:
    """The next text. `steps` are the engine's records, opaque.

    Text may be empty beside these, or beside what is told of its tokens.
    """

    text: str
    steps: list[object] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    choice: int = 0


@dataclass(frozen=True, slots=True)
class BlockStop:
    """The text block is complete."""

    choice: int = 0


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """How a choice ended. `stop_sequence` is the string that matched, if one did.

    `is_last`: all choices have ended.
    """

    stop_reason: StopReason
    stop_sequence: str | None
    usage: AnswerUsage
    choice: int = 0
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class MessageStop:
    """Nothing follows of this choice."""

    choice: int = 0


Event = MessageStart | PromptDelta | BlockStart | TextDelta | BlockStop | MessageEnd | MessageStop

# What a record or an event weighs in an outbox beside its text, in bytes, roughly.
_RECORD_BYTES = 128
_TOKEN_BYTES = 64


def merge_events(last: Event, new: Event) -> bool:
    """Fold the next text of a choice into the text that still waits."""
    if not (isinstance(last, TextDelta) and isinstance(new, TextDelta)):
        return False
    if last.choice != new.choice:
        return False
    last.text += new.text
    last.steps += new.steps
    last.tokens += new.tokens
    return True


def event_bytes(event: Event) -> int:
    """About how much memory an event holds that a client must read in time."""
    if isinstance(event, TextDelta):
        records = _RECORD_BYTES * (1 + len(event.steps))
        return len(event.text.encode()) + records + _token_bytes(event.tokens)
    if isinstance(event, PromptDelta):
        return _RECORD_BYTES + _token_bytes(event.tokens)
    return _RECORD_BYTES


def _token_bytes(tokens: list[TokenInfo]) -> int:
    return _TOKEN_BYTES * sum(1 + len(token.alternatives) for token in tokens)
