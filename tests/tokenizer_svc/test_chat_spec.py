"""What is wrong with a conversation is said before any work, with its place."""

import pytest

from noria.reasons import Reason, RequestError
from noria.service import limits
from noria.v1 import chat_pb2
from tokenizer_svc.chat_encoder import ChatMessage
from tokenizer_svc.translate import chat_messages

USER, ASSISTANT, SYSTEM = chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT, chat_pb2.ROLE_SYSTEM


def block(text):
    return chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text=text))


def message(role, *texts):
    return chat_pb2.Message(role=role, content=[block(text) for text in texts])


def spec(*messages, **fields):
    return chat_pb2.ChatSpec(messages=messages, **fields)


def test_system_text_comes_first_and_blocks_are_joined():
    """Nothing is put between blocks, and an empty system text is a system text."""
    turns = chat_messages(spec(message(USER, "a", "", "b"), message(ASSISTANT, "c"), system=""))
    assert turns == [
        ChatMessage("system", ""),
        ChatMessage("user", "ab"),
        ChatMessage("assistant", "c"),
    ]


@pytest.mark.parametrize(
    "roles", [[SYSTEM], [ASSISTANT, USER], [USER, USER], [ASSISTANT, ASSISTANT], [USER, SYSTEM]]
)
def test_roles_may_come_in_any_order(roles):
    """TOK-07: what a model accepts is for its template to say."""
    assert len(chat_messages(spec(*(message(role, "x") for role in roles)))) == len(roles)


TOOL_USE = chat_pb2.ContentBlock(tool_use=chat_pb2.ToolUseBlock(id="1", name="f"))
FORCED = chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_ANY)
OK = message(USER, "hi")


@pytest.mark.parametrize(
    ("bad", "reason", "field"),
    [
        (spec(), Reason.INVALID_FIELD, "messages"),
        (spec(*[OK] * (limits.MAX_MESSAGES + 1)), Reason.INVALID_FIELD, "messages"),
        (spec(OK, message(USER)), Reason.INVALID_FIELD, "messages[1].content"),
        (spec(message(USER, *["x"] * 65)), Reason.INVALID_FIELD, "messages[0].content"),
        (spec(OK, message(0, "x")), Reason.INVALID_FIELD, "messages[1].role"),
        (spec(OK, message(17, "x")), Reason.INVALID_FIELD, "messages[1].role"),
        (
            spec(chat_pb2.Message(role=USER, content=[block("a"), chat_pb2.ContentBlock()])),
            Reason.INVALID_FIELD,
            "messages[0].content[1]",
        ),
        (
            spec(chat_pb2.Message(role=ASSISTANT, content=[block("a"), TOOL_USE])),
            Reason.UNSUPPORTED,
            "messages[0].content[1].tool_use",
        ),
        (spec(OK, tools=[chat_pb2.Tool(name="f")]), Reason.UNSUPPORTED, "tools"),
        (spec(OK, tool_choice=FORCED), Reason.UNSUPPORTED, "tool_choice"),
        (spec(OK, thinking=True), Reason.UNSUPPORTED, "thinking"),
        (
            spec(message(USER, "가" * (limits.MAX_CHAT_BYTES // 3)), system="xx"),
            Reason.MESSAGE_TOO_LARGE,
            "messages",
        ),
    ],
)
def test_bad_conversations_are_refused_with_their_field(bad, reason, field):
    """The reason says who can help, the field where."""
    with pytest.raises(RequestError) as caught:
        chat_messages(bad)
    assert caught.value.reason is reason
    assert [name for name, _ in caught.value.fields] == [field]


def test_counts_and_sizes_are_named_with_both_numbers():
    """What was sent, and what is allowed."""
    with pytest.raises(RequestError, match="4097 messages; from 1 to 4096"):
        chat_messages(spec(*[OK] * 4097))
    too_long = "x" * (limits.MAX_CHAT_BYTES + 1)
    with pytest.raises(RequestError, match="4194305 bytes of text; at most 4194304"):
        chat_messages(spec(message(USER, too_long)))


def test_a_conversation_at_every_limit_is_accepted():
    """The limits are the last values that pass."""
    most = [message(USER, *[""] * 64)] + [OK] * (limits.MAX_MESSAGES - 1)
    assert len(chat_messages(spec(*most))) == limits.MAX_MESSAGES
    assert chat_messages(spec(message(USER, "x" * limits.MAX_CHAT_BYTES)))
    assert chat_messages(spec(OK, thinking=False))
