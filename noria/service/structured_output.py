"""What a structured output may ask for, checked before anything is compiled.

Schemas are treated like prompts: no message here repeats any of their text.
"""

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from noria.service import limits


class StructuredOutputError(ValueError):
    """A grammar that cannot be taken. `part` is the field within the structured output."""

    def __init__(self, part: str, problem: str) -> None:
        super().__init__(problem)
        self.part = part
        self.problem = problem


def parse_json_schema(text: str) -> dict[str, Any]:
    """The schema as JSON; members keep their order, which is that of the output's properties.

    Raises StructuredOutputError for what is too large, nested too deeply, no JSON (NaN and
    infinities are none) or no object, and for objects with two members of one name.
    """
    _check_size("json_schema", text, limits.MAX_JSON_SCHEMA_BYTES)
    try:
        schema = json.loads(
            text, parse_constant=_no_number, parse_float=_number, object_pairs_hook=_members
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise StructuredOutputError("json_schema", f"not JSON: {error.msg}: {where}") from None
    except RecursionError:
        raise _too_deep() from None
    except _NotJSONError as error:
        raise StructuredOutputError("json_schema", f"not JSON: {error}") from None
    except ValueError:
        problem = "an integer has more digits than can be read"
        raise StructuredOutputError("json_schema", problem) from None
    if not isinstance(schema, dict):
        raise StructuredOutputError("json_schema", "not a JSON object")
    _check_depth(schema)
    return schema


def check_regex(text: str) -> None:
    """Raises StructuredOutputError for an empty one, and for one that is too large."""
    _check_size("regex", text, limits.MAX_REGEX_BYTES)


def check_choices(choices: Iterable[str]) -> None:
    """Raises StructuredOutputError unless there is a choice, and room for all of them."""
    texts = list(choices)
    if not 1 <= len(texts) <= limits.MAX_GRAMMAR_CHOICES:
        counted = f"{len(texts)} strings; at least 1, at most {limits.MAX_GRAMMAR_CHOICES}"
        raise StructuredOutputError("choice.choices", counted)
    for index, text in enumerate(texts):
        if not text:
            raise StructuredOutputError(f"choice.choices[{index}]", "0 bytes; at least 1")
    total = sum(len(text.encode()) for text in texts)
    if total > limits.MAX_GRAMMAR_CHOICES_BYTES:
        counted = f"{total} bytes together; at most {limits.MAX_GRAMMAR_CHOICES_BYTES}"
        raise StructuredOutputError("choice.choices", counted)


class _NotJSONError(ValueError):
    """Python reads it, JSON does not allow it."""


def _check_size(part: str, text: str, limit: int) -> None:
    size = len(text.encode())
    if not 1 <= size <= limit:
        raise StructuredOutputError(part, f"{size} bytes; at least 1, at most {limit}")


def _no_number(literal: str) -> NoReturn:
    raise _NotJSONError(f"{literal} is no number")


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _NotJSONError("a number is beyond the range of a double")
    return value


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _NotJSONError("an object has two members of the same name")
    return members


def _check_depth(value: Any) -> None:
    """Level by level, so that no depth is too much for this."""
    level = [value]
    for _ in range(limits.MAX_JSON_SCHEMA_DEPTH):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return
    raise _too_deep()


def _children(value: Any) -> Iterable[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inner if isinstance(child, dict | list)]


def _too_deep() -> StructuredOutputError:
    deepest = limits.MAX_JSON_SCHEMA_DEPTH
    return StructuredOutputError("json_schema", f"nested more than {deepest} levels deep")
