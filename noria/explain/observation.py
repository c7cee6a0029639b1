"""What a client saw of one request: what it asked, the events and when they came, the end.

Everything else in this package is computed from this, and from nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from noria.v1 import chat_pb2, common_pb2


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. `turns` are (role, text), oldest first; absent options were left to the server."""

    turns: Sequence[tuple[str, str]]
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None

    @property
    def question(self) -> str:
        return self.turns[-1][1]

    @property
    def num_earlier_turns(self) -> int:
        return len(self.turns) - 1

    @property
    def earlier_share(self) -> float:
        """The share of the text, in bytes, that an earlier request has carried already.

        0 without an answer among the turns; else everything but the last turn.
        """
        if all(role != "assistant" for role, _ in self.turns[:-1]):
            return 0.0
        last = len(self.question.encode())
        earlier = sum(len(text.encode()) for _, text in self.turns[:-1])
        earlier += len((self.system or "").encode())
        return earlier / max(1, earlier + last)


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event of the stream, and when it came: microseconds since the question was sent."""

    at_us: int
    event: chat_pb2.StreamEvent


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was not served: the reason's name, the message, and what to do.

    `request_id` is empty where no router took the call.
    """

    reason: str
    message: str
    advice: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """One request from the question to its end, `wall_us` microseconds later."""

    asked: Asked
    wall_us: int
    arrivals: Sequence[Arrival] = ()
    timeline: common_pb2.Timeline = field(default_factory=common_pb2.Timeline)
    failure: Failure | None = None

    @property
    def request_id(self) -> str:
        """The router's; empty if none took the call."""
        of_failure = self.failure.request_id if self.failure else ""
        return self.timeline.request_id or of_failure

    @property
    def model(self) -> str:
        """The model that answers; empty if the answer never began."""
        return next((a.event.message_start.model for a in self.arrivals), "")

    @property
    def first_text(self) -> Arrival | None:
        """The first piece of text, if one came."""
        return next((a for a in self.arrivals if a.event.content_block_delta.text), None)

    @property
    def end(self) -> chat_pb2.MessageDelta | None:
        """How the answer ended, of a served request."""
        ends = (a.event.message_delta for a in self.arrivals if a.event.HasField("message_delta"))
        return next(ends, None)
