"""Bad input is refused here, field by field, before anything is done for it."""

from collections.abc import Iterator

from noria.reasons import invalid_field
from noria.service import limits
from noria.v1 import chat_pb2
from router.option_checks import (
    at_most,
    check_counts,
    generation_input,
    unsupported,
)
from router.requests import Conversation, GenerationInput, Prompt, RawIds, RawText, Turn

_ROLES = {
    chat_pb2.ROLE_SYSTEM: "system",
    chat_pb2.ROLE_USER: "user",
    chat_pb2.ROLE_ASSISTANT: "assistant",
}


def checked_chat(spec: chat_pb2.ChatSpec, priority_ceiling: int) -> GenerationInput:
    """The conversation and how to answer it, as plain data.

    Raises RequestError (INVALID_FIELD, MESSAGE_TOO_LARGE, UNSUPPORTED) for the first
    fault, naming the field and both numbers.
    """
    _check_chat_counts(spec)
    check_counts(spec)
    _refuse_tools(spec)
    system = spec.system if spec.HasField("system") else None
    conversation = Conversation(system, tuple(_turns(spec)))
    return generation_input(spec, priority_ceiling, conversation)


def checked_completion(spec: chat_pb2.CompletionSpec, priority_ceiling: int) -> GenerationInput:
    """The raw prompt and how to continue it, as plain data. Raises as `checked_chat` does."""
    check_counts(spec)
    return generation_input(spec, priority_ceiling, _raw_prompt(spec))


def _check_chat_counts(spec: chat_pb2.ChatSpec) -> None:
    if not spec.messages:
        raise invalid_field("messages", "0 messages; at least 1")
    at_most("messages", len(spec.messages), limits.MAX_MESSAGES, "messages")
    blocks = sum(len(message.content) for message in spec.messages)
    at_most("messages", blocks, limits.MAX_BLOCKS, "content blocks")
    at_most("tools", len(spec.tools), limits.MAX_TOOLS, "tools")


def _refuse_tools(spec: chat_pb2.ChatSpec) -> None:
    modes = (chat_pb2.TOOL_CHOICE_MODE_UNSPECIFIED, chat_pb2.TOOL_CHOICE_MODE_NONE)
    asked = {
        "tools": bool(spec.tools),
        "tool_choice": spec.tool_choice.mode not in modes,
        "thinking": spec.thinking,
    }
    for field, is_asked in asked.items():
        if is_asked:
            raise unsupported(field)


def _turns(spec: chat_pb2.ChatSpec) -> Iterator[Turn]:
    for index, message in enumerate(spec.messages):
        field = f"messages[{index}]"
        if message.role not in _ROLES:
            raise invalid_field(f"{field}.role", "not a role; system, user and assistant are")
        at_most(f"{field}.content", len(message.content), limits.MAX_BLOCKS_PER_MESSAGE, "blocks")
        texts = tuple(_texts(message, field))
        if not any(texts):
            raise invalid_field(f"{field}.content", "0 characters of text; at least 1")
        yield Turn(_ROLES[message.role], texts)


def _texts(message: chat_pb2.Message, field: str) -> Iterator[str]:
    for index, block in enumerate(message.content):
        kind = block.WhichOneof("block")
        if kind is None:
            raise invalid_field(f"{field}.content[{index}]", "an empty block; text is supported")
        if kind != "text":
            raise unsupported(f"{field}.content[{index}].{kind}")
        yield block.text.text


def _raw_prompt(spec: chat_pb2.CompletionSpec) -> Prompt:
    kind = spec.WhichOneof("prompt")
    if kind is None:
        raise invalid_field("prompt", "none; text or token_ids is needed")
    if kind == "text":
        if not spec.text:
            raise invalid_field("text", "0 characters; at least 1")
        add = spec.add_special_tokens if spec.HasField("add_special_tokens") else True
        return RawText(spec.text, add_special_tokens=add)
    if not spec.token_ids.ids:
        raise invalid_field("token_ids.ids", "0 ids; at least 1")
    at_most("token_ids.ids", len(spec.token_ids.ids), limits.MAX_PROMPT_IDS, "ids")
    return RawIds(tuple(spec.token_ids.ids))
