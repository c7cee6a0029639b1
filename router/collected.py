"""An answer's events gathered into one response."""

from noria.v1 import chat_pb2
from router import wire_events
from router.events import Event, MessageEnd, MessageStart, TextDelta


class CollectedAnswer:
    """Takes each event, and how it would have been told on a stream."""

    def __init__(self) -> None:
        self._start: MessageStart | None = None
        self._texts: list[str] = []
        self._steps: list[object] = []
        self._end: MessageEnd | None = None
        self._told = chat_pb2.StreamEvent()

    def add(self, event: Event, told: chat_pb2.StreamEvent) -> None:
        match event:
            case MessageStart():
                self._start = event
            case TextDelta():
                self._texts.append(event.text)
                self._steps += event.steps
            case MessageEnd():
                self._end, self._told = event, told
            case _:
                pass

    def fill(self, response: chat_pb2.ChatResponse | chat_pb2.CompletionResponse) -> None:
        """The whole answer; an answer that ended has both a start and an end."""
        if self._start is None or self._end is None:
            raise RuntimeError("an answer without a start or an end")
        response.request_id = self._start.request_id
        response.model = self._start.model
        response.choices.append(wire_events.choice("".join(self._texts), self._steps, self._end))
        response.usage.CopyFrom(wire_events.wire_usage(self._end.usage))
        response.timeline.CopyFrom(self._told.message_delta.timeline)
