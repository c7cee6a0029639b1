"""Translations between the router's plain data and the tokenizer service's messages."""

from noria.v1 import chat_pb2, tokenizer_pb2
from router.decode_slot import DecodeSlot, SlotText
from router.requests import Conversation, RawText

_ROLES = {
    "system": chat_pb2.ROLE_SYSTEM,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
}
# How many of the prompt's last ids a decode slot is opened with.
_PROMPT_TAIL = 8


def encode_text_request(prompt: RawText, model: str) -> tokenizer_pb2.EncodeRequest:
    """The text, for the tokenizer's model of this name."""
    return tokenizer_pb2.EncodeRequest(
        model=model, text=prompt.text, add_special_tokens=prompt.add_special_tokens
    )


def encode_chat_request(chat: Conversation, model: str) -> tokenizer_pb2.EncodeChatRequest:
    """The conversation, for the tokenizer's model of this name."""
    messages = [
        chat_pb2.Message(
            role=_ROLES[turn.role],
            content=[chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text=t)) for t in turn.texts],
        )
        for turn in chat.turns
    ]
    spec = chat_pb2.ChatSpec(model=model, system=chat.system, messages=messages)
    return tokenizer_pb2.EncodeChatRequest(spec=spec)


def decode_open(slot: DecodeSlot, number: int, model: str) -> tokenizer_pb2.DecodeSessionRequest:
    """Open a slot with all ids so far."""
    options = slot.options
    return tokenizer_pb2.DecodeSessionRequest(
        open=tokenizer_pb2.DecodeOpen(
            slot=number,
            model=model,
            stop_sequences=options.stop_sequences,
            min_tokens=options.min_tokens,
            skip_special_tokens=options.skip_special_tokens,
            prompt_tail_ids=options.prompt_tail_ids[-_PROMPT_TAIL:],
            output_token_ids=slot.token_ids,
            starts_in_thinking=options.starts_in_thinking,
        )
    )


def decode_close(number: int, *, flush: bool) -> tokenizer_pb2.DecodeSessionRequest:
    """Close a slot, with what it holds back or without."""
    return tokenizer_pb2.DecodeSessionRequest(
        close=tokenizer_pb2.DecodeClose(slot=number, flush=flush)
    )


def slot_text(decoded: tokenizer_pb2.DecodedText) -> SlotText:
    """What became of a slot's ids."""
    return SlotText(
        byte_offset=decoded.byte_offset,
        text=decoded.text,
        num_ids=decoded.num_ids,
        stop=((decoded.stop.index, decoded.stop.token_index) if decoded.HasField("stop") else None),
        closed=decoded.closed,
        failed=bool(decoded.error),
        duration_us=decoded.duration_us,
        pieces=list(decoded.pieces),
    )
