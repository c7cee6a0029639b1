"""What the sources say about the API beside the protos: limits, reasons, what is served."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from noria.client.errors import ERROR_OF
from noria.reasons import RETRY_OF, Reason, RequestError
from noria.service import limits
from noria.service.errors import STATUS_OF
from noria.v1 import chat_pb2, chat_pb2_grpc
from router.servicer import ChatServicer
from router.validation import checked_chat
from scripts.documented import Enum


@dataclass(frozen=True)
class Limit:
    name: str
    value: str
    comment: str


@dataclass
class LimitGroup:
    comment: str
    limits: list[Limit] = field(default_factory=list)


def limit_groups() -> list[LimitGroup]:
    """The constants of noria/service/limits.py under the comments that stand alone there."""
    source = Path(limits.__file__).read_text("utf-8")
    names = {
        node.lineno: node.targets[0].id
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    groups: list[LimitGroup] = []
    comment: list[str] = []
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("#"):
            comment.append(line.removeprefix("# "))
        elif number in names:
            if not comment:
                raise SystemExit(f"limits.{names[number]}: a comment is needed")
            value = _value(names[number], getattr(limits, names[number]))
            groups[-1].limits.append(Limit(names[number], value, " ".join(comment)))
            comment = []
        elif comment:
            groups.append(LimitGroup(" ".join(comment)))
            comment = []
    return groups


def _value(name: str, value: float) -> str:
    if name.endswith("_BYTES"):
        for unit, size in (("MiB", 1024 * 1024), ("KiB", 1024)):
            if value % size == 0:
                return f"{value // size} {unit}"
        return f"{value} bytes"
    if name.endswith(("_S", "_SECONDS")):
        return f"{value:g} s"
    return f"{value:,}"


@dataclass(frozen=True)
class ReasonRow:
    reason: str
    status: str
    exception: str
    meaning: str
    retry: str
    section: str


def reason_rows(enum: Enum) -> Iterator[ReasonRow]:
    """The reasons in the proto's order.

    A status that a comment ends with must be the one that is sent. Raises SystemExit.
    """
    for value in enum.values[1:]:
        reason = Reason(value.name.removeprefix("REASON_"))
        status = STATUS_OF[reason].name
        ending = re.search(r" ([A-Z]+(?:_[A-Z]+)*)\.$", value.comment)
        if ending and ending[1] != status:
            raise SystemExit(f"{value.name}: sent with {status}, the proto says {ending[1]}")
        yield ReasonRow(
            reason=reason.value,
            status=status,
            exception=ERROR_OF[reason].__name__,
            meaning=value.comment[: ending.start()] if ending else value.comment,
            retry=RETRY_OF[reason].value,
            section=value.section,
        )


def is_served(method: str) -> bool:
    """Whether this version's router implements a method of ChatService."""
    return getattr(ChatServicer, method) is not getattr(chat_pb2_grpc.ChatServiceServicer, method)


def unsupported_fields() -> set[tuple[str, str]]:
    """(message, field) of what a chat may name and this version's router refuses by name."""
    found = set()
    for name in _names(chat_pb2.ChatSpec, but=("messages", "sampling")):
        spec = _question()
        _set(spec, name)
        found |= {("ChatSpec", name)} if _is_refused(spec) else set()
    for name in _names(type(_question().sampling)):
        spec = _question()
        _set(spec.sampling, name)
        found |= {("SamplingParams", name)} if _is_refused(spec) else set()
    for name in _names(chat_pb2.ContentBlock):
        spec = _question()
        _set(spec.messages[0].content.add(), name)
        found |= {("ContentBlock", name)} if _is_refused(spec) else set()
    return found


def _names(kind: type[Message], but: tuple[str, ...] = ()) -> list[str]:
    return [member.name for member in kind.DESCRIPTOR.fields if member.name not in but]


def _question() -> chat_pb2.ChatSpec:
    block = chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text="a"))
    message = chat_pb2.Message(role=chat_pb2.ROLE_USER, content=[block])
    return chat_pb2.ChatSpec(messages=[message])


def _is_refused(spec: chat_pb2.ChatSpec) -> bool:
    try:
        checked_chat(spec, limits.MAX_PRIORITY)
    except RequestError as error:
        if error.reason is Reason.UNSUPPORTED:
            return True
        raise
    return False


def _set(message: Message, name: str) -> None:
    """Give a field a value that asks for something."""
    member = message.DESCRIPTOR.fields_by_name[name]
    target = getattr(message, name)
    if member.message_type and member.message_type.GetOptions().map_entry:
        target[2] = 0.5
    elif member.is_repeated:
        target.add() if member.message_type else target.append(_scalar(member))
    elif member.message_type:
        target.SetInParent()
        _set(target, member.message_type.fields[0].name)
    else:
        setattr(message, name, _scalar(member))


def _scalar(member: Any) -> Any:
    samples = {
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_FLOAT: 0.5,
        FieldDescriptor.CPPTYPE_STRING: "{}",
        FieldDescriptor.CPPTYPE_ENUM: 1,
    }
    return samples.get(member.cpp_type, 2)
