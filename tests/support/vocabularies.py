"""Small vocabularies for tests: id = place in the list."""

from noria.service.vocabulary import Vocabulary


def vocabulary_of(*pieces: str | bytes, special: tuple[str, ...] = ()) -> Vocabulary:
    """A vocabulary of these pieces, of which those in `special` are control tokens."""
    encoded = tuple(p.encode() if isinstance(p, str) else p for p in pieces)
    return Vocabulary(encoded, tuple(p in special for p in pieces), ())


def bytes_vocabulary() -> Vocabulary:
    """Every byte at its own value, then `<|end|>` (256), the only control token."""
    return vocabulary_of(*(bytes([b]) for b in range(256)), "<|end|>", special=("<|end|>",))
