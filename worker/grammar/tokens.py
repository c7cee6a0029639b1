"""The vocabulary as a grammar sees it: the bytes of each id, and which ids it may never use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.grammar.source import GrammarError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class TokenTable:
    """`pieces` has the bytes of each id; ids from there up to `size` are padding.

    No grammar allows `special_ids`; `eos_ids` alone say that the output is over.
    """

    pieces: Sequence[bytes]
    special_ids: Sequence[int]
    eos_ids: Sequence[int]
    size: int

    def tokenizer(self) -> "LLTokenizer":
        """The library's index of all tokens; about 0.1 s for 50,000 of them.

        Raises GrammarError for a vocabulary that cannot be indexed.
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        if not self.eos_ids:
            raise GrammarError("this model has no EOS id that could end the output")
        try:
            return LLTokenizer(
                TokenizerWrapper(_Pieces(self)), n_vocab=self.size, eos_token=list(self.eos_ids)
            )
        except BaseException as error:
            # A panic of the library is no Exception.
            raise GrammarError("this model's vocabulary cannot be indexed") from error


class _Pieces:
    """The tokens in the form that llguidance's `TokenizerWrapper` takes."""

    def __init__(self, table: TokenTable) -> None:
        padding = [b""] * (table.size - len(table.pieces))
        self.tokens = [*table.pieces, *padding]
        self.special_token_ids = sorted({*table.special_ids, *table.eos_ids})
        self.eos_token_id = table.eos_ids[0]
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        """Used for forced bytes alone, and no grammar has any."""
        return []
