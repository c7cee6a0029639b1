"""Token ids into text, id by id, never splitting a character."""

import codecs

from noria.service.vocabulary import Vocabulary


class UnknownTokenError(ValueError):
    """An id outside the vocabulary. The message may be logged: it does not name the id."""


class Detokenizer:
    """Incremental decoding of one output.

    The joined text equals decoding all bytes at once, with U+FFFD for what is not UTF-8.
    Control tokens are left out with `skip_special`.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes. Raises UnknownTokenError."""
        piece = piece_of(self._vocabulary, token_id)
        if self._skip_special and self._vocabulary.is_special[token_id]:
            return ""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """U+FFFD for a character that was cut off; the empty text otherwise."""
        return self._decoder.decode(b"", final=True)


def piece_of(vocabulary: Vocabulary, token_id: int) -> bytes:
    """The bytes of one id; may be part of a character. Raises UnknownTokenError."""
    if not 0 <= token_id < len(vocabulary):
        raise UnknownTokenError(f"not below {len(vocabulary)}, the size of the vocabulary")
    return vocabulary.pieces[token_id]
