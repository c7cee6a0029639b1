"""An answer, and how it is put together from a stream's events."""

from collections.abc import Iterable
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
class ChatChoice:
    """One answer. `stop_sequence` is what matched when `stop_reason` says so.

    `tokens` has what was told of each output token, where `logprobs` asked for it.
    """

    text: str
    stop_reason: StopReason
    stop_sequence: str | None
    usage: Usage
    tokens: tuple[chat_pb2.TokenInfo, ...] = ()


@dataclass(frozen=True)
class ChatResult:
    """A whole answer: the first of `choices`, of which there are `n`.

    `usage` is that of all choices together; the prompt counts once. `prompt_tokens` has what
    was told of each prompt token, where `prompt_logprobs` asked for it.
    """

    text: str
    stop_reason: StopReason
    stop_sequence: str | None
    usage: Usage
    request_id: str
    model: str
    timeline: common_pb2.Timeline
    choices: tuple[ChatChoice, ...] = ()
    prompt_tokens: tuple[chat_pb2.PromptToken, ...] = ()


def result_of(response: chat_pb2.ChatResponse | chat_pb2.CompletionResponse) -> ChatResult:
    """A unary answer."""
    choices = tuple(_choice(choice) for choice in response.choices)
    return _result(
        choices,
        Usage.of(response.usage),
        response.request_id,
        response.model,
        response.timeline,
        response.prompt_tokens,
    )


def _choice(choice: chat_pb2.Choice) -> ChatChoice:
    return ChatChoice(
        text="".join(block.text.text for block in choice.content),
        stop_reason=_STOP_REASONS.get(choice.stop_reason, "unspecified"),
        stop_sequence=choice.stop_sequence if choice.HasField("stop_sequence") else None,
        usage=Usage.of(choice.usage),
        tokens=tuple(choice.tokens),
    )


def _result(
    choices: tuple[ChatChoice, ...],
    usage: Usage,
    request_id: str,
    model: str,
    timeline: common_pb2.Timeline,
    prompt_tokens: Iterable[chat_pb2.PromptToken],
) -> ChatResult:
    first = choices[0] if choices else ChatChoice("", "unspecified", None, Usage())
    return ChatResult(
        text=first.text,
        stop_reason=first.stop_reason,
        stop_sequence=first.stop_sequence,
        usage=usage,
        request_id=request_id,
        model=model,
        timeline=timeline,
        choices=choices,
        prompt_tokens=tuple(prompt_tokens),
    )


class _ChoiceBuilder:
    """Follows one choice's events."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._tokens: list[chat_pb2.TokenInfo] = []
        self._end = chat_pb2.MessageDelta()
        self.begun = False
        self.stopped = False

    def add(self, event: chat_pb2.StreamEvent) -> None:
        match event.WhichOneof("event"):
            case "message_start":
                self.begun = True
            case "content_block_delta":
                self._pieces.append(event.content_block_delta.text)
                self._tokens += event.content_block_delta.tokens
            case "message_delta":
                self._end = event.message_delta
            case "message_stop":
                self.stopped = True
            case _:
                pass

    def choice(self) -> ChatChoice:
        """The choice so far."""
        end = self._end
        return ChatChoice(
            text="".join(self._pieces),
            stop_reason=_STOP_REASONS.get(end.stop_reason, "unspecified"),
            stop_sequence=end.stop_sequence if end.HasField("stop_sequence") else None,
            usage=Usage.of(end.usage),
            tokens=tuple(self._tokens),
        )


class AnswerBuilder:
    """Follows a stream's events."""

    def __init__(self) -> None:
        self._start = chat_pb2.MessageStart()
        self._timeline = common_pb2.Timeline()
        self._choices: dict[int, _ChoiceBuilder] = {}
        self._prompt_tokens: list[chat_pb2.PromptToken] = []

    @property
    def stopped(self) -> bool:
        """Whether every choice that has begun is complete; all begin together."""
        begun = [choice for choice in self._choices.values() if choice.begun]
        return bool(begun) and all(choice.stopped for choice in begun)

    def add(self, event: chat_pb2.StreamEvent) -> None:
        """Take one event in."""
        if event.HasField("message_start"):
            self._start = event.message_start
        if event.message_delta.HasField("timeline"):
            self._timeline = event.message_delta.timeline
        self._prompt_tokens += event.prompt_delta.tokens
        self._choices.setdefault(event.choice, _ChoiceBuilder()).add(event)

    def result(self, request_id: str) -> ChatResult:
        """The answer so far."""
        choices = tuple(self._choices[index].choice() for index in sorted(self._choices))
        request_id = self._start.request_id or request_id
        return _result(
            choices,
            _whole(choices),
            request_id,
            self._start.model,
            self._timeline,
            self._prompt_tokens,
        )


def _whole(choices: tuple[ChatChoice, ...]) -> Usage:
    first = choices[0].usage if choices else Usage()
    output_tokens = sum(choice.usage.output_tokens for choice in choices)
    return Usage(first.input_tokens, first.cached_tokens, output_tokens)
