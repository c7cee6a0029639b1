"""Write docs/api.md from the protos' comments and the sources; with --check, say if it is stale."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from noria.service.channel import KEEPALIVE_S
from router.config import RouterConfig
from scripts.api_facts import is_served, limit_groups, reason_rows, unsupported_fields
from scripts.documented import Enum, Field, Message, Method, Protos, Service, read_protos

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
_LISTEN = next(member for member in fields(RouterConfig) if member.name == "listen")
PORT = str(_LISTEN.default).rpartition(":")[2]
NOT_YET = "**Not in this version.**"

INTRODUCTION = f"""\
# API

<!-- Made by `make docs` from the protos' comments and the sources: change those. -->

Clients call one gRPC service, `noria.v1.ChatService`, on the router: port {PORT} unless told
otherwise, with TLS where it has a certificate. Its protos are
[chat.proto](../protos/noria/v1/chat.proto) and [common.proto](../protos/noria/v1/common.proto);
a running router shows them by reflection.
For Python there is a [client](../README.md#from-python); [examples](../examples) holds an app
server and a call with grpcurl.

[Calling](#calling) · [Methods](#methods) · [Messages](#messages) · [Reasons](#reasons) ·
[Limits](#limits) · [Internal services](#internal-services)
"""

CONNECTIONS = f"""\
Connections: a client may keep one connection for all its calls and send keepalive pings every
{KEEPALIVE_S} s, also without calls. `grpc.health.v1.Health` answers for the empty name and for
`noria.v1.ChatService` whether the router is ready, and for `live` whether it is alive.
"""

MESSAGES = """\
In the order of a request, its answer, and what they share. A field marked *optional* tells absent
from zero. The zero of each enum, `..._UNSPECIFIED`, means that none was set; it is left out here.
"""

REASONS = """\
The last column says whether the same request may pass later. Where an error carries `RetryInfo`,
its delay comes before a caller's own pauses; the Python client waits for it and asks again, within
the deadline, as long as no event has come.
"""

LIMITS = "The constants of [limits.py](../noria/service/limits.py)."


def page() -> str:
    """The whole of docs/api.md."""
    protos = read_protos(["admin", "chat", "common", "tokenizer", "worker"])
    text = "\n".join([INTRODUCTION, *_api(protos), *_admin(protos), *_internal(protos)])
    return text.replace("\n\n\n", "\n\n")


def _api(protos: Protos) -> Iterator[str]:
    service = protos.services["ChatService"]
    yield f"## Calling\n\n{_after_first_paragraph(service.comment)}\n\n{CONNECTIONS}"
    yield from _methods(service, protos)
    yield from _messages(service, protos)
    yield from _reasons(protos.types["Reason"])
    yield from _limits()


def _after_first_paragraph(comment: str) -> str:
    return comment.partition("\n\n")[2]


def _methods(service: Service, protos: Protos) -> Iterator[str]:
    yield "## Methods\n"
    rows = ((_link(m.name), _answers(m), "yes" if is_served(m.name) else "no", _first(m.comment))
            for m in service.methods)  # fmt: skip
    yield _table(("Method", "Answers with", "Served", "Meaning"), rows)
    yield (
        "A method that this version does not serve answers `UNIMPLEMENTED`. A field that it does\n"
        "not honour is marked below; a request that uses one is refused as\n"
        "[UNSUPPORTED](#reasons).\n"
    )
    for method in service.methods:
        mark = "" if is_served(method.name) else f" {NOT_YET}"
        yield f"### {method.name}\n\n{method.comment}{mark}\n"
        yield _end("Request", method.request, protos)
        kind = "Stream of" if method.streams_response else "Response"
        yield _end(kind, method.response, protos)


def _answers(method: Method) -> str:
    return "a stream" if method.streams_response else "one message"


def _end(title: str, name: str, protos: Protos) -> str:
    """A method's request or response: it has no section of its own."""
    message = protos.types[name]
    if not isinstance(message, Message):
        raise TypeError(f"{name} is no message")
    text = f"{title} `{name}`" + (":" if message.fields else ", which is empty.")
    comment = f"\n\n{message.comment}" if message.comment else ""
    return f"{text}{comment}\n\n{_fields(message, protos, set())}".rstrip("\n") + "\n"


def _messages(service: Service, protos: Protos) -> Iterator[str]:
    ends = _ends(service.methods)
    served = protos.reachable(_ends(m for m in service.methods if is_served(m.name)))
    unsupported = unsupported_fields()
    yield f"## Messages\n\n{MESSAGES}"
    for kind in protos.reachable(ends):
        if kind.name not in ends and kind.name != "Reason":
            mark = "" if kind in served else f" {NOT_YET}"
            yield f"### {kind.name}\n\n{kind.comment}{mark}\n"
            yield _values(kind) if isinstance(kind, Enum) else _fields(kind, protos, unsupported)


def _ends(methods: Iterable[Method]) -> list[str]:
    return [name for method in methods for name in (method.request, method.response)]


def _fields(message: Message, protos: Protos, unsupported: set[tuple[str, str]]) -> str:
    rows = []
    for member in message.fields:
        mark = f" {NOT_YET}" if (message.name, member.name) in unsupported else ""
        rows.append((f"`{member.name}`", _type(member, protos), member.comment + mark))
    return _table(("Field", "Type", "Meaning"), rows) if rows else ""


def _type(member: Field, protos: Protos) -> str:
    kind = _link(member.type) if member.type in protos.types else member.type
    if member.key_type:
        kind = f"map of {member.key_type} to {kind}"
    if member.repeated:
        kind = f"list of {kind}"
    if member.oneof:
        kind += f", one of *{member.oneof}*"
    return f"{kind}, *optional*" if member.optional else kind


def _values(enum: Enum) -> str:
    rows = ((f"`{value.name}`", value.comment) for value in enum.values[1:])
    return _table(("Value", "Meaning"), rows)


def _reasons(enum: Message | Enum) -> Iterator[str]:
    if not isinstance(enum, Enum):
        raise TypeError(f"{enum.name} is no enum")
    yield f'## Reasons\n\n<a id="reason"></a>{enum.comment}\n\n{REASONS}'
    sections: dict[str, list[tuple[str, ...]]] = {}
    for row in reason_rows(enum):
        cells = (f"`{row.reason}`", f"`{row.status}`", f"`{row.exception}`", row.meaning, row.retry)
        sections.setdefault(row.section, []).append(cells)
    for section, rows in sections.items():
        yield f"**{section}**\n"
        yield _table(("Reason", "gRPC status", "In Python", "Meaning", "Retry"), rows)


def _limits() -> Iterator[str]:
    yield f"## Limits\n\n{LIMITS}\n"
    for group in limit_groups():
        yield f"**{group.comment}**\n"
        rows = ((f"`{limit.name}`", limit.value, limit.comment) for limit in group.limits)
        yield _table(("Limit", "Value", "Meaning"), rows)


def _admin(protos: Protos) -> Iterator[str]:
    service = protos.services["AdminService"]
    yield f"## Administration\n\n{service.comment}\n"
    yield (
        "`noria keys`, `noria status`, `noria ps` and `noria drain` call it. Its messages are\n"
        "described in [admin.proto](../protos/noria/v1/admin.proto).\n"
    )
    yield _table(("Method", "Meaning"), ((f"`{m.name}`", m.comment) for m in service.methods))


def _internal(protos: Protos) -> Iterator[str]:
    yield "## Internal services\n"
    yield (
        "The router calls these; they ask for no key and belong in a private network. Their\n"
        "messages are described in [tokenizer.proto](../protos/noria/v1/tokenizer.proto) and\n"
        "[worker.proto](../protos/noria/v1/worker.proto).\n"
    )
    for name in ("TokenizerService", "WorkerService"):
        service = protos.services[name]
        yield f"### {name}\n\n{service.comment}\n"
        yield _table(("Method", "Meaning"), ((f"`{m.name}`", m.comment) for m in service.methods))


def _link(name: str) -> str:
    return f"[{name}](#{name.lower().replace('.', '')})"


def _first(comment: str) -> str:
    """The first sentence, without its full stop."""
    return comment.partition(". ")[0].removesuffix(".")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = tuple(head)
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("\n\n", "<br>").replace("|", "\\|")


def main() -> None:
    fresh = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(fresh, "utf-8")
    elif not PAGE.exists() or PAGE.read_text("utf-8") != fresh:
        raise SystemExit("docs/api.md is stale; run `make docs`")


if __name__ == "__main__":
    main()
