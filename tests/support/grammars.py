"""A small vocabulary for grammars: every byte, a few longer tokens, EOS and a control token."""

import numpy as np

from worker.grammar.matcher import compiled, num_words
from worker.grammar.source import GrammarKind, GrammarSource
from worker.grammar.tokens import TokenTable

LONGER = [b'{"', b'":', b"true", b"null", b"  ", b"\n  ", b"ab", b"abc", "é".encode()]
PIECES = [bytes([byte]) for byte in range(256)] + LONGER
CONTROL, EOS = len(PIECES), len(PIECES) + 1
TABLE = TokenTable((*PIECES, b"<|control|>", b"<|end|>"), [CONTROL, EOS], [EOS], 280)


def json_schema(text: str) -> GrammarSource:
    return GrammarSource(GrammarKind.JSON_SCHEMA, (text,))


def regex(text: str) -> GrammarSource:
    return GrammarSource(GrammarKind.REGEX, (text,))


def choice(*texts: str) -> GrammarSource:
    return GrammarSource(GrammarKind.CHOICE, texts)


def compile_source(source: GrammarSource, table: TokenTable = TABLE):
    """The compiled grammar, without a trial."""
    return compiled(table.tokenizer(), source)


def matchers(source: GrammarSource, count: int):
    """As many fresh matchers."""
    grammar = compile_source(source)
    return [grammar.matcher() for _ in range(count)]


def allowed(matcher, size: int = TABLE.size) -> set[int]:
    """The ids that may follow."""
    bits = np.zeros(num_words(size), np.int32)
    matcher.fill(bits)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def ids_of(text: str | bytes) -> list[int]:
    """Its bytes, one id each."""
    return list(text.encode() if isinstance(text, str) else text)


def takes(grammar, text: str) -> bool:
    """Whether the whole text, byte by byte, is an output that may end there."""
    matcher = grammar.matcher()
    for token_id in ids_of(text):
        if token_id not in allowed(matcher):
            return False
        matcher.accept(token_id)
    return EOS in allowed(matcher)


class HeldTicket:
    """A claim whose grammar is there when the test says so."""

    def __init__(self, source, count=1):
        self.source, self.count = source, count
        self.outcome = None
        self.cancelled = False

    @property
    def is_done(self):
        return self.outcome is not None

    def result(self):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def cancel(self):
        self.cancelled = True


class HeldCompiler:
    """Compiles nothing before it is told to."""

    def __init__(self):
        self.tickets = []

    def request(self, source, count=1, salt=b""):
        self.tickets.append(HeldTicket(source, count))
        return self.tickets[-1]

    def finish(self, index=-1, outcome=None):
        """Let one be done, with what it asked for or with an error."""
        ticket = self.tickets[index]
        ticket.outcome = outcome or matchers(ticket.source, ticket.count)
