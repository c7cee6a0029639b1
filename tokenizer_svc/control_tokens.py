"""The model's control tokens in text: found where the template wrote them, undone elsewhere."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# The longest of published models have about 40.
MAX_LETTERS = 256


@dataclass(frozen=True)
class ControlToken:
    """One special token. The flags say what else of the text it takes in, as in `tokenizers`."""

    text: str
    token_id: int
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class ControlTokens:
    """All control tokens of a model. Immutable after construction.

    Raises ValueError for a token of a single letter, inside which no marker fits, or of more
    than MAX_LETTERS.
    """

    def __init__(self, tokens: Iterable[ControlToken]) -> None:
        self._by_text = {token.text: token for token in tokens}
        for text in self._by_text:
            if not 2 <= len(text) <= MAX_LETTERS:
                raise ValueError(
                    f"control token {text:.40} has {len(text)} letters; from 2 to {MAX_LETTERS}"
                )
        pattern = _longest_of(sorted(self._by_text)) or r"(?!)"
        self._pattern = re.compile(pattern)
        # The first letter of each token, of one that begins inside another too.
        self._first_letter = re.compile(f"(?={pattern})(?s:.)")
        self._beginnings = {t[:i] for t in self._by_text for i in range(1, len(t))}
        self._endings = {t[i:] for t in self._by_text for i in range(1, len(t))}
        self._longest = max(map(len, self._by_text), default=0)

    @property
    def token_ids(self) -> frozenset[int]:
        return frozenset(token.token_id for token in self._by_text.values())

    def split(self, text: str) -> Iterator[str | int]:
        """The text as runs of ordinary text and ids of control tokens, in order."""
        done = 0
        for match in self._pattern.finditer(text):
            token = self._by_text[match.group()]
            if match.start() < done or (token.single_word and _inside_word(text, match)):
                continue
            before = text[done : match.start()]
            if token.lstrip:
                before = before.rstrip()
            if before:
                yield before
            yield token.token_id
            done = _end_of_space(text, match.end()) if token.rstrip else match.end()
        if done < len(text):
            yield text[done:]

    def neutralise(self, text: str, marker: str) -> str:
        """The text with a marker in every control token that is written, begun or ended in it.

        `marker` is a letter of neither the text nor any token. Whatever stands before the
        result, or after it, no control token is found that takes in a part of it. Taking the
        markers out restores the text.
        """
        text = self._first_letter.sub(lambda match: match[0] + marker, text)
        body = text.rstrip()
        if any(body[-n:] in self._beginnings for n in range(1, min(self._longest, len(body) + 1))):
            text = body + marker + text[len(body) :]
        body = text.lstrip()
        if any(body[:n] in self._endings for n in range(1, min(self._longest, len(body) + 1))):
            text = text[: len(text) - len(body)] + marker + body
        return text


def _end_of_space(text: str, start: int) -> int:
    space = re.compile(r"\s*").match(text, start)
    return space.end() if space else start


def _inside_word(text: str, match: re.Match[str]) -> bool:
    neighbours = (
        text[max(match.start() - 1, 0) : match.start()] + text[match.end() : match.end() + 1]
    )
    return bool(re.search(r"\w", neighbours))


def _longest_of(words: Sequence[str]) -> str:
    """A pattern for the longest of sorted words, as a trie: its cost does not grow with them."""
    ends_here = bool(words) and not words[0]
    rest = words[1:] if ends_here else words
    branches = []
    while rest:
        letter = rest[0][0]
        same = [word for word in rest if word[0] == letter]
        rest = rest[len(same) :]
        branches.append(re.escape(letter) + _longest_of([word[1:] for word in same]))
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 and not ends_here else f"(?:{'|'.join(branches)})"
    return f"{pattern}?" if ends_here else pattern
