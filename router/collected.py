"""An answer's events gathered into one response."""

from dataclasses import dataclass, field

from noria.v1 import chat_pb2, common_pb2
from router import wire_events
from router.events import (
    Event,
    MessageEnd,
    MessageStart,
    PromptDelta,
    TextDelta,
    TokenInfo,
)


@dataclass(slots=True)
class _Choice:
    """One choice so far."""

    texts: list[str] = field(default_factory=list)
    steps: list[object] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    end: MessageEnd | None = None

    def to_proto(self) -> chat_pb2.Choice:
        if self.end is None:
            raise RuntimeError("a choice without an end")
        return wire_events.choice("".join(self.texts), self.steps, self.tokens, self.end)


class CollectedAnswer:
    """Takes each event, and how it would have been told on a stream."""

    def __init__(self) -> None:
        self._start: MessageStart | None = None
        self._choices: dict[int, _Choice] = {}
        self._prompt: list[TokenInfo] = []
        self._timeline = common_pb2.Timeline()

    def add(self, event: Event, told: chat_pb2.StreamEvent) -> None:
        choice = self._choices.setdefault(event.choice, _Choice())
        match event:
            case MessageStart():
                self._start = event
            case PromptDelta():
                self._prompt += event.tokens
            case TextDelta():
                choice.texts.append(event.text)
                choice.steps += event.steps
                choice.tokens += event.tokens
            case MessageEnd():
                choice.end = event
                if event.is_last:
                    self._timeline = told.message_delta.timeline
            case _:
                pass

    def fill(self, response: chat_pb2.ChatResponse | chat_pb2.CompletionResponse) -> None:
        """The whole answer; an answer that ended has both a start and an end."""
        if self._start is None:
            raise RuntimeError("an answer without a start")
        response.request_id = self._start.request_id
        response.model = self._start.model
        response.choices.extend(self._choices[i].to_proto() for i in sorted(self._choices))
        response.prompt_tokens.extend(map(wire_events.prompt_token, self._prompt))
        response.usage.CopyFrom(self._timeline.usage)
        response.timeline.CopyFrom(self._timeline)
