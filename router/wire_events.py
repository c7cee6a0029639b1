"""An answer's events on the wire, for clients."""

from collections.abc import Sequence

from noria.v1 import chat_pb2, common_pb2
from router.events import (
    AnswerUsage,
    BlockStart,
    BlockStop,
    Event,
    MessageEnd,
    MessageStart,
    PromptDelta,
    StopReason,
    TextDelta,
    TokenInfo,
)

STOP_REASONS = {
    StopReason.END_TURN: chat_pb2.STOP_REASON_END_TURN,
    StopReason.MAX_TOKENS: chat_pb2.STOP_REASON_MAX_TOKENS,
    StopReason.STOP_SEQUENCE: chat_pb2.STOP_REASON_STOP_SEQUENCE,
}


def stream_event(event: Event) -> chat_pb2.StreamEvent:
    """An event of a choice and its one block."""
    told = _stream_event(event)
    told.choice = event.choice
    return told


def _stream_event(event: Event) -> chat_pb2.StreamEvent:
    if isinstance(event, TextDelta):
        return chat_pb2.StreamEvent(content_block_delta=_text_delta(event))
    if isinstance(event, MessageStart):
        start = chat_pb2.MessageStart(
            request_id=event.request_id,
            model=event.model,
            usage=common_pb2.Usage(input_tokens=event.input_tokens),
        )
        return chat_pb2.StreamEvent(message_start=start)
    if isinstance(event, PromptDelta):
        prompt = chat_pb2.PromptDelta(tokens=map(prompt_token, event.tokens))
        return chat_pb2.StreamEvent(prompt_delta=prompt)
    if isinstance(event, BlockStart):
        block = chat_pb2.ContentBlock(text=chat_pb2.TextBlock())
        return chat_pb2.StreamEvent(
            content_block_start=chat_pb2.ContentBlockStart(content_block=block)
        )
    if isinstance(event, BlockStop):
        return chat_pb2.StreamEvent(content_block_stop=chat_pb2.ContentBlockStop())
    if isinstance(event, MessageEnd):
        return chat_pb2.StreamEvent(message_delta=_message_delta(event))
    return chat_pb2.StreamEvent(message_stop=chat_pb2.MessageStop())


def _text_delta(event: TextDelta) -> chat_pb2.ContentBlockDelta:
    if not (event.steps or event.tokens):
        return chat_pb2.ContentBlockDelta(text=event.text)
    delta = chat_pb2.ContentBlockDelta(
        steps=step_records(event.steps), tokens=map(token_info, event.tokens)
    )
    if event.text:
        delta.text = event.text
    return delta


def token_info(token: TokenInfo) -> chat_pb2.TokenInfo:
    """What is told of one token of the output."""
    return chat_pb2.TokenInfo(
        id=token.token_id,
        bytes=token.piece,
        # Only the first of a prompt has none.
        logprob=token.logprob or 0.0,
        alternatives=_alternatives(token),
    )


def prompt_token(token: TokenInfo) -> chat_pb2.PromptToken:
    """What is told of one token of the prompt."""
    return chat_pb2.PromptToken(
        id=token.token_id,
        bytes=token.piece,
        logprob=token.logprob,
        alternatives=_alternatives(token),
    )


def _alternatives(token: TokenInfo) -> list[chat_pb2.TokenAlternative]:
    return [
        chat_pb2.TokenAlternative(id=other.token_id, bytes=other.piece, logprob=other.logprob)
        for other in token.alternatives
    ]


def step_records(steps: Sequence[object]) -> list[common_pb2.StepRecord]:
    """The engine's records, which pass through the router as they are."""
    return [step for step in steps if isinstance(step, common_pb2.StepRecord)]


def _message_delta(event: MessageEnd) -> chat_pb2.MessageDelta:
    return chat_pb2.MessageDelta(
        stop_reason=STOP_REASONS[event.stop_reason],
        stop_sequence=event.stop_sequence,
        usage=wire_usage(event.usage),
    )


def wire_usage(usage: AnswerUsage) -> common_pb2.Usage:
    """Token counts."""
    return common_pb2.Usage(
        input_tokens=usage.input_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
    )


def choice(
    text: str, steps: Sequence[object], tokens: Sequence[TokenInfo], end: MessageEnd
) -> chat_pb2.Choice:
    """A whole answer: one text block, empty if there is no text."""
    return chat_pb2.Choice(
        content=[chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text=text))],
        stop_reason=STOP_REASONS[end.stop_reason],
        stop_sequence=end.stop_sequence,
        steps=step_records(steps),
        tokens=map(token_info, tokens),
        usage=wire_usage(end.usage),
    )
