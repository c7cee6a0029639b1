"""A batch's input: one request a line, as JSON."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noria.client.request import (
    ChatOptions,
    Messages,
    RawPrompt,
    chat_spec,
    checked_timeout,
    completion_spec,
)

MAX_LINE_BYTES = 16 * 2**20
# What a line may hold besides what the client takes as an option.
_OWN = ("id", "messages", "prompt")


class LineError(ValueError):
    """A line that is no request; the text names line and field, and quotes nothing of it."""


@dataclass(frozen=True, slots=True)
class Line:
    """Line `number` (from 1) of the input; `id` is its own name, or the number.

    It asks a chat's `messages` or a raw `prompt`; the other one is None.
    """

    number: int
    id: str
    messages: Messages | None
    prompt: RawPrompt | None
    options: ChatOptions


def read_lines(path: Path, priority: int) -> Iterator[Line]:
    """The requests of a file, one after the other; blank lines are passed over.

    A request has `messages` (role and content each) or a `prompt` (text, or token ids), may
    have an `id`, and any option of the client; where it names no priority it gets `priority`.
    Raises LineError.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
            if len(raw) > MAX_LINE_BYTES:
                raise LineError(f"line {number}: more than {MAX_LINE_BYTES} bytes")
            if raw.strip():
                yield _line(number, raw, priority)


def _line(number: int, raw: bytes, priority: int) -> Line:
    try:
        request = json.loads(raw)
    except (ValueError, RecursionError):
        raise LineError(f"line {number}: not JSON") from None
    if not isinstance(request, dict):
        raise LineError(f"line {number}: not a JSON object")
    given = request.get("id", number)
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise LineError(f"line {number}: id: a text or a whole number is needed")
    try:
        str(given).encode()
    except UnicodeEncodeError:
        raise LineError(f"line {number}: id: not valid Unicode") from None
    try:
        return _request(number, str(given), {"priority": priority, **request})
    except (ValueError, TypeError) as error:
        raise LineError(f"line {number}: {error}") from None


def _request(number: int, line_id: str, request: dict[str, Any]) -> Line:
    options: Any = {name: value for name, value in request.items() if name not in _OWN}
    if options.get("timeout") is not None:
        checked_timeout(options["timeout"])
    messages, prompt = request.get("messages"), request.get("prompt")
    if messages is not None and prompt is not None:
        raise ValueError("prompt: not together with messages")
    if messages is not None:
        if not isinstance(messages, list):
            raise TypeError("messages: a list is needed")
        chat_spec(messages, options)
    elif prompt is not None:
        completion_spec(prompt, options)
    else:
        raise ValueError("messages: missing, and there is no prompt")
    return Line(number, line_id, messages, prompt, options)
