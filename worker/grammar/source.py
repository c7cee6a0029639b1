"""What a request's output must be, as it was asked for."""

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property


class GrammarKind(StrEnum):
    """How a grammar is written; the name of its field on the wire."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"


@dataclass(frozen=True)
class GrammarSource:
    """A grammar of one kind. `texts`: the schema, the expression, the choices, or nothing.

    They are treated like prompts: never shown, never part of an error.
    """

    kind: GrammarKind
    texts: tuple[str, ...] = field(default=(), repr=False)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over the kind and each text with its length."""
        digest = hashlib.sha256(self.kind.encode())
        for text in self.texts:
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
        return digest.digest()

    @property
    def field(self) -> str:
        """The field of a request that it came in."""
        return f"sampling.structured_output.{self.kind}"


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says why and repeats none of its text."""


class CompilerFailedError(Exception):
    """An accident while a grammar was compiled: it says nothing about the grammar."""
