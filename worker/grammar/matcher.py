"""How far one output has come in its grammar, and what may follow."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from worker.grammar import problems
from worker.grammar.source import GrammarError, GrammarSource

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Bits = npt.NDArray[np.int32]
T = TypeVar("T")


def parser_limits() -> "LLParserLimits":
    """What a grammar may cost: about 20 ms to compile, 5 ms a step, and 20 MB of states for
    all choices of a request together.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        step_max_items=50_000,
        max_lexer_states=10_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def num_words(vocab_size: int) -> int:
    """32-bit words of a row with one bit per id."""
    return (vocab_size + 31) // 32


class CompiledGrammar:
    """A grammar that compiles, from which each choice of a request gets a matcher.

    Matchers of one compiled grammar share the states that they have found so far, and their
    limit. So each request has a compiled grammar of its own: its output would end by what
    others had written.
    """

    def __init__(self, tokenizer: "LLTokenizer", notation: str) -> None:
        """Raises GrammarError for what does not compile, or allows no first token."""
        from llguidance import LLMatcher

        self._fresh = LLMatcher(tokenizer, notation, log_level=0, limits=parser_limits())
        if self._fresh.is_error():
            raise GrammarError(problems.told(self._fresh.get_error()))
        first = self.matcher()
        first.fill(np.zeros(num_words(tokenizer.vocab_size), np.int32))
        if first.problem:
            raise GrammarError(first.problem)

    def matcher(self, output_token_ids: Sequence[int] = ()) -> "Matcher":
        """A fresh matcher that has accepted these ids; nothing is compiled again."""
        matcher = Matcher(self._fresh.deep_copy(), self)
        matcher.accept_all(output_token_ids)
        return matcher


class Matcher:
    """One output's place in its grammar.

    `problem` says why nothing can follow any more although the output is not complete; it is
    empty as long as all is well. `grammar` lives until the last of its matchers is closed.
    """

    def __init__(self, matcher: "LLMatcher", grammar: CompiledGrammar) -> None:
        self._matcher = matcher
        self._grammar: CompiledGrammar | None = grammar
        self.problem = ""

    def close(self) -> None:
        """The output is over, whoever still knows of it."""
        self._grammar = None

    def accept_all(self, token_ids: Sequence[int]) -> None:
        """The output so far."""
        for token_id in token_ids:
            self.accept(token_id)

    def accept(self, token_id: int) -> None:
        """One more output token."""
        accepted = self._guarded(lambda: self._matcher.consume_token(token_id))
        if not accepted and not self.problem:
            self.problem = "the output does not follow it"

    def fill(self, bits: Bits) -> None:
        """Set in `bits`, int32 [num_words], the bit of each id that may follow.

        Where nothing may, none is set and `problem` says why. EOS may follow where the
        output is complete, and alone where nothing else can.
        """
        bits.fill(0)
        if not self.problem:
            self._guarded(
                lambda: self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            )
        if not self.problem and self._matcher.is_error():
            self.problem = problems.told(self._matcher.get_error())
        if self.problem:
            bits.fill(0)
        elif not bits.any():
            self.problem = problems.told("NoExtension")

    def _guarded(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except BaseException:
            # A panic of the library is no Exception, and must not end the engine.
            self.problem = problems.TOO_COMPLEX
            return None


def compiled(tokenizer: "LLTokenizer", source: GrammarSource) -> CompiledGrammar:
    """Raises GrammarError."""
    from worker.grammar.notation import lark

    return CompiledGrammar(tokenizer, lark(source))
