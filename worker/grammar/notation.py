"""A request's grammar in the notation of llguidance (a dialect of Lark)."""

import json
from typing import Any

from noria.service.structured_output import StructuredOutputError, parse_json_schema
from worker.grammar.source import GrammarError, GrammarKind, GrammarSource

# Between the tokens of JSON a model may write nothing, one space, or a line break with its
# indentation; without a bound it could write white space for ever.
MAX_INDENT = 32
_JSON_OPTIONS = {
    "whitespace_pattern": rf" |\n {{0,{MAX_INDENT}}}",
    "lenient": False,
    "coerce_one_of": False,
}
# Forced bytes would be cut into tokens by a tokenizer, which a worker does not have. Without
# them the model chooses, as everywhere else, among all tokens that fit.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'


def lark(source: GrammarSource) -> str:
    """The grammar whose only rule is `start`. Raises GrammarError."""
    match source.kind:
        case GrammarKind.JSON_SCHEMA:
            return _NO_FORCING + _json(_parsed(source.texts[0]))
        case GrammarKind.JSON_OBJECT:
            return _NO_FORCING + _json({"type": "object"})
        case GrammarKind.REGEX:
            return _NO_FORCING + _regex(source.texts[0])
        case GrammarKind.CHOICE:
            return _NO_FORCING + _regex("|".join(map(_literal, source.texts)))


def _parsed(text: str) -> dict[str, Any]:
    try:
        return parse_json_schema(text)
    except StructuredOutputError as error:
        raise GrammarError(error.problem) from None


def _json(schema: dict[str, Any]) -> str:
    """How JSON is written is not the caller's to say: its options are replaced by ours."""
    return "start: %json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS})


def _regex(pattern: str) -> str:
    from llguidance import regex_to_lark

    return f"start: /{regex_to_lark(pattern, '')}/"


def _literal(text: str) -> str:
    """A regular expression for exactly this text."""
    plain = (c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
    return "".join(plain)
