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


@dataclass(frozen=True, slots=True)
class BlockStart:
    """The text block begins; an answer has exactly one, which may stay empty."""


@dataclass(slots=True)
class TextDelta:
    """The next text. `steps` are the engine's records, opaque; text may be empty beside them."""

    text: str
    steps: list[object] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BlockStop:
    """The text block is complete."""


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """How the answer ended. `stop_sequence` is the string that matched, if one did."""

    stop_reason: StopReason
    stop_sequence: str | None
    usage: AnswerUsage


@dataclass(frozen=True, slots=True)
class MessageStop:
    """Nothing follows."""


Event = MessageStart | BlockStart | TextDelta | BlockStop | MessageEnd | MessageStop

# What a record or an event without text weighs in an outbox, in bytes, roughly.
_RECORD_BYTES = 128


def merge_events(last: Event, new: Event) -> bool:
    """Fold the next text into the text that still waits."""
    if not (isinstance(last, TextDelta) and isinstance(new, TextDelta)):
        return False
    last.text += new.text
    last.steps += new.steps
    return True


def event_bytes(event: Event) -> int:
    """About how much memory an event holds."""
    if isinstance(event, TextDelta):
        return len(event.text.encode()) + _RECORD_BYTES * len(event.steps)
    return _RECORD_BYTES
