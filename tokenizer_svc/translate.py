"""Wire messages into the domain's values and back; what is wrong with them is said here."""

from collections.abc import Sequence

from noria.reasons import Reason, RequestError, invalid_field
from noria.service.limits import MAX_BLOCKS_PER_MESSAGE, MAX_CHAT_BYTES, MAX_MESSAGES
from noria.v1 import chat_pb2, tokenizer_pb2
from tokenizer_svc.chat_encoder import ASSISTANT, ChatMessage
from tokenizer_svc.decode_slot import DecodedText, SlotOptions
from tokenizer_svc.decode_slots import PendingTexts

_ROLES: dict[int, str] = {
    chat_pb2.ROLE_SYSTEM: "system",
    chat_pb2.ROLE_USER: "user",
    chat_pb2.ROLE_ASSISTANT: ASSISTANT,
}


def check_text_size(field: str, size: int) -> None:
    """Raises RequestError (MESSAGE_TOO_LARGE) for more UTF-8 bytes than a prompt may have."""
    if size > MAX_CHAT_BYTES:
        problem = f"{size} bytes of text; at most {MAX_CHAT_BYTES}"
        raise RequestError(
            Reason.MESSAGE_TOO_LARGE, f"{field}: {problem}", fields=((field, problem),)
        )


def chat_messages(spec: chat_pb2.ChatSpec) -> list[ChatMessage]:
    """The conversation with `system` first. Raises RequestError before any work.

    The blocks of a message are joined as they are. Roles may follow each other in any order;
    the model's template has the last word on that.
    """
    _check_counts(spec)
    _check_supported(spec)
    turns = [_message(i, message) for i, message in enumerate(spec.messages)]
    if spec.HasField("system"):
        turns.insert(0, ChatMessage("system", spec.system))
    check_text_size("messages", text_size(turns))
    return turns


def text_size(messages: Sequence[ChatMessage]) -> int:
    """All texts together, in UTF-8 bytes."""
    return sum(len(message.content.encode()) for message in messages)


def _check_counts(spec: chat_pb2.ChatSpec) -> None:
    if not 1 <= len(spec.messages) <= MAX_MESSAGES:
        raise invalid_field("messages", f"{len(spec.messages)} messages; from 1 to {MAX_MESSAGES}")
    for i, message in enumerate(spec.messages):
        if not 1 <= len(message.content) <= MAX_BLOCKS_PER_MESSAGE:
            problem = f"{len(message.content)} blocks; from 1 to {MAX_BLOCKS_PER_MESSAGE}"
            raise invalid_field(f"messages[{i}].content", problem)


def _check_supported(spec: chat_pb2.ChatSpec) -> None:
    if spec.tools:
        raise _unsupported("tools")
    if spec.tool_choice.mode not in (
        chat_pb2.TOOL_CHOICE_MODE_UNSPECIFIED,
        chat_pb2.TOOL_CHOICE_MODE_NONE,
    ):
        raise _unsupported("tool_choice")
    if spec.thinking:
        raise _unsupported("thinking")


def _unsupported(field: str) -> RequestError:
    problem = "not supported"
    return RequestError(Reason.UNSUPPORTED, f"{field}: {problem}", fields=((field, problem),))


def _message(index: int, message: chat_pb2.Message) -> ChatMessage:
    role = _ROLES.get(message.role)
    if role is None:
        raise invalid_field(f"messages[{index}].role", f"{message.role} is not a known role")
    texts = [
        _block_text(f"messages[{index}].content[{i}]", block)
        for i, block in enumerate(message.content)
    ]
    return ChatMessage(role, "".join(texts))


def _block_text(field: str, block: chat_pb2.ContentBlock) -> str:
    kind = block.WhichOneof("block")
    if kind is None:
        raise invalid_field(field, "a block of no known kind")
    if kind != "text":
        raise _unsupported(f"{field}.{kind}")
    return block.text.text


def slot_options(opened: tokenizer_pb2.DecodeOpen) -> SlotOptions:
    return SlotOptions(
        stop_sequences=tuple(opened.stop_sequences),
        min_tokens=opened.min_tokens,
        skip_special=opened.skip_special_tokens,
    )


def responses(pending: PendingTexts, now: float) -> list[tokenizer_pb2.DecodeSessionResponse]:
    """What to write for what waited until `now` (the session's clock, in seconds)."""
    written = []
    if pending.texts:
        texts = [_decoded_text(text, now) for text in pending.texts.values()]
        batch = tokenizer_pb2.DecodedBatch(texts=texts)
        written.append(tokenizer_pb2.DecodeSessionResponse(batch=batch))
    if pending.draining:
        draining = tokenizer_pb2.DecodeDraining()
        written.append(tokenizer_pb2.DecodeSessionResponse(draining=draining))
    return written


def _decoded_text(decoded: DecodedText, now: float) -> tokenizer_pb2.DecodedText:
    message = tokenizer_pb2.DecodedText(
        slot=decoded.slot,
        kind=tokenizer_pb2.BLOCK_KIND_TEXT,
        byte_offset=decoded.byte_offset,
        text="".join(decoded.text),
        num_ids=decoded.num_ids,
        closed=decoded.closed,
        pieces=decoded.pieces,
        error=decoded.error,
        duration_us=max(0, round((now - decoded.arrived_at) * 1e6)),
    )
    if decoded.stop is not None:
        message.stop.index = decoded.stop.index
        message.stop.token_index = decoded.stop.token_index
    return message
