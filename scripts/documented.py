"""The protos as data: every service, message and enum with its own comments.

Comments are found by the paths of `SourceCodeInfo` in descriptor.proto.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent.parent / "protos"
PACKAGE = ".noria.v1."
# Field numbers of descriptor.proto, which make up the paths.
_MESSAGE, _ENUM, _SERVICE, _METHOD, _FIELD, _NESTED, _VALUE = 4, 5, 6, 2, 2, 3, 2

# FieldDescriptorProto.Type and .Label.
_SCALARS = {1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 8: "bool",
            9: "string", 12: "bytes", 13: "uint32"}  # fmt: skip
_REPEATED = 3


@dataclass(frozen=True)
class Field:
    """`type` is a scalar's name or that of a message or enum; `key_type` is a map's."""

    name: str
    type: str
    comment: str
    repeated: bool = False
    optional: bool = False
    key_type: str = ""
    oneof: str = ""


@dataclass(frozen=True)
class Message:
    """A message; nested ones bear their parent's name as well, `Parent.Child`."""

    name: str
    comment: str
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Value:
    """An enum's value. `section` is the comment that stands alone before it."""

    name: str
    comment: str
    section: str


@dataclass(frozen=True)
class Enum:
    name: str
    comment: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Method:
    name: str
    comment: str
    request: str
    response: str
    streams_request: bool
    streams_response: bool


@dataclass(frozen=True)
class Service:
    name: str
    comment: str
    methods: tuple[Method, ...]


@dataclass
class Protos:
    """All files together, in the order of files and of declarations."""

    services: dict[str, Service] = field(default_factory=dict)
    types: dict[str, Message | Enum] = field(default_factory=dict)

    def reachable(self, names: list[str]) -> list[Message | Enum]:
        """The types that these refer to, themselves included, in the order of the protos."""
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name in found or name not in self.types:
                continue
            found.add(name)
            kind = self.types[name]
            if isinstance(kind, Message):
                waiting += [member.type for member in kind.fields]
        return [kind for name, kind in self.types.items() if name in found]


def read_protos(names: list[str]) -> Protos:
    """The protos of these names, below noria/v1. Raises SystemExit if protoc refuses them."""
    protos = Protos()
    for file in _descriptors(names):
        _read_file(file, protos)
    return protos


def _descriptors(names: list[str]) -> list[FileDescriptorProto]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "descriptors"
        includes = [f"-I{PROTOS}", f"-I{files('grpc_tools') / '_proto'}"]
        sources = [str(PROTOS / "noria" / "v1" / f"{name}.proto") for name in names]
        arguments = ["--include_source_info", f"--descriptor_set_out={output}"]
        code = protoc.main(["protoc", *includes, *arguments, *sources])
        if code != 0:
            raise SystemExit(f"protoc failed with exit status {code}")
        read = {file.name: file for file in FileDescriptorSet.FromString(output.read_bytes()).file}
    return [read[f"noria/v1/{name}.proto"] for name in names]


class _Comments:
    """Leading comments of one file, by path."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._by_path = {tuple(place.path): place for place in file.source_code_info.location}

    def of(self, *path: int) -> str:
        place = self._by_path.get(path)
        return _text(place.leading_comments) if place else ""

    def standing_alone_before(self, *path: int) -> str:
        place = self._by_path.get(path)
        return _text("\n\n".join(place.leading_detached_comments)) if place else ""


def _text(comment: str) -> str:
    """Paragraphs of one line each."""
    paragraphs = "\n".join(line.strip() for line in comment.splitlines()).split("\n\n")
    return "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())


def _read_file(file: FileDescriptorProto, protos: Protos) -> None:
    comments = _Comments(file)
    for i, service in enumerate(file.service):
        protos.services[service.name] = _service(service, (_SERVICE, i), comments)
    kinds: list[tuple[int, list[Message | Enum]]] = []
    for i, message in enumerate(file.message_type):
        path = (_MESSAGE, i)
        kinds.append((_line(file, path), _messages(message, path, "", comments)))
    for i, enum in enumerate(file.enum_type):
        path = (_ENUM, i)
        kinds.append((_line(file, path), [_enum(enum, path, comments)]))
    for _, group in sorted(kinds, key=lambda kind: kind[0]):
        protos.types.update({kind.name: kind for kind in group})


def _line(file: FileDescriptorProto, path: tuple[int, ...]) -> int:
    """The line on which what stands at `path` begins."""
    return next(p.span[0] for p in file.source_code_info.location if tuple(p.path) == path)


def _service(service: Any, path: tuple[int, ...], comments: _Comments) -> Service:
    methods = tuple(
        Method(
            method.name,
            comments.of(*path, _METHOD, i),
            method.input_type.removeprefix(PACKAGE),
            method.output_type.removeprefix(PACKAGE),
            method.client_streaming,
            method.server_streaming,
        )
        for i, method in enumerate(service.method)
    )
    return Service(service.name, comments.of(*path), methods)


def _messages(
    message: Any, path: tuple[int, ...], parent: str, comments: _Comments
) -> list[Message | Enum]:
    name = f"{parent}{message.name}"
    maps = {f"{PACKAGE}{name}.{m.name}": m for m in message.nested_type if m.options.map_entry}
    members = tuple(
        _field(message, member, maps, comments.of(*path, _FIELD, i))
        for i, member in enumerate(message.field)
    )
    found: list[Message | Enum] = [Message(name, comments.of(*path), members)]
    for i, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            found += _messages(nested, (*path, _NESTED, i), f"{name}.", comments)
    return found


def _field(message: Any, member: Any, maps: dict[str, Any], comment: str) -> Field:
    entry = maps.get(member.type_name)
    value = entry.field[1] if entry else member
    in_oneof = member.HasField("oneof_index") and not member.proto3_optional
    return Field(
        name=member.name,
        type=_type(value),
        comment=comment,
        repeated=member.label == _REPEATED and entry is None,
        optional=member.proto3_optional,
        key_type=_type(entry.field[0]) if entry else "",
        oneof=message.oneof_decl[member.oneof_index].name if in_oneof else "",
    )


def _type(member: Any) -> str:
    return member.type_name.removeprefix(PACKAGE) or _SCALARS[member.type]


def _enum(enum: Any, path: tuple[int, ...], comments: _Comments) -> Enum:
    return Enum(enum.name, comments.of(*path), tuple(_values(enum, path, comments)))


def _values(enum: Any, path: tuple[int, ...], comments: _Comments) -> Iterator[Value]:
    section = ""
    for i, value in enumerate(enum.value):
        place = (*path, _VALUE, i)
        section = comments.standing_alone_before(*place) or section
        yield Value(value.name, comments.of(*place), section)
