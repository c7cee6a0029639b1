"""An answer, and how it is put together from a stream's events."""

from dataclasses import dataclass
from typing import Literal

from noria.v1 import chat_pb2, common_pb2

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "unspecified"]

_STOP_REASONS: dict[int, StopReason] = {
    chat_pb2.STOP_REASON_END_TURN: "end_turn",
    chat_pb2.STOP_REASON_MAX_TOKENS: "max_tokens",
    chat_pb2.STOP_REASON_STOP_SEQUENCE: "stop_sequence",
    chat_pb2.STOP_REASON_TOOL_USE: "tool_use",
}


@dataclass(frozen=True)
class Usage:
    """Tokens as they are charged; `cached_tokens` of the input came from the prefix cache."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @classmethod
    def of(cls, usage: common_pb2.Usage) -> "Usage":
        return cls(usage.input_tokens, usage.cached_tokens, usage.output_tokens)


@dataclass(frozen=True)
class ChatResult:
    """A whole answer. `stop_sequence` is what matched when `stop_reason` says so."""

    text: str
    stop_reason: StopReason
    stop_sequence: str | None
    usage: Usage
    request_id: str
    model: str
    timeline: common_pb2.Timeline


def result_of(response: chat_pb2.ChatResponse) -> ChatResult:
    """The first choice of a unary answer."""
    choice = response.choices[0] if response.choices else chat_pb2.Choice()
    return ChatResult(
        text="".join(block.text.text for block in choice.content),
        stop_reason=_STOP_REASONS.get(choice.stop_reason, "unspecified"),
        stop_sequence=choice.stop_sequence if choice.HasField("stop_sequence") else None,
        usage=Usage.of(response.usage),
        request_id=response.request_id,
        model=response.model,
        timeline=response.timeline,
    )


class AnswerBuilder:
    """Follows a stream's events. The first choice's text counts as the answer."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._start = chat_pb2.MessageStart()
        self._end = chat_pb2.MessageDelta()
        self._timeline = common_pb2.Timeline()
        self.stopped = False

    def add(self, event: chat_pb2.StreamEvent) -> str:
        """Take one event in; its piece of text, or an empty one."""
        kind = event.WhichOneof("event")
        if kind == "message_start":
            self._start = event.message_start
        elif kind == "message_stop":
            self.stopped = True
        elif kind == "message_delta":
            self._close(event.message_delta, event.choice)
        elif kind == "content_block_delta" and event.choice == 0:
            text = event.content_block_delta.text
            self._pieces.append(text)
            return text
        return ""

    def _close(self, delta: chat_pb2.MessageDelta, choice: int) -> None:
        if choice == 0:
            self._end = delta
        if delta.HasField("timeline"):
            self._timeline = delta.timeline

    def result(self, request_id: str) -> ChatResult:
        """The answer so far."""
        end = self._end
        return ChatResult(
            text="".join(self._pieces),
            stop_reason=_STOP_REASONS.get(end.stop_reason, "unspecified"),
            stop_sequence=end.stop_sequence if end.HasField("stop_sequence") else None,
            usage=Usage.of(end.usage),
            request_id=self._start.request_id or request_id,
            model=self._start.model,
            timeline=self._timeline,
        )
