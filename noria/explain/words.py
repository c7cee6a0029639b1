"""Durations, tokens and texts as people read them."""

import unicodedata

from noria.explain.steps import Token

_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
# Controls, invisible formatting, surrogates, private use, unassigned, line separators: they
# would steer the terminal or shift a table's columns.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def duration(us: float) -> str:
    """Two or three digits with a unit."""
    if us >= 999_500:
        return f"{us / 1e6:.2f} s"
    return f"{us / 1e3:.0f} ms" if us >= 9_950 else f"{us / 1e3:.1f} ms"


def quoted(text: str, max_length: int = 1_000) -> str:
    """The text in quotes on one line, everything invisible spelled out, cut if it is longer."""
    cut = text if len(text) <= max_length else text[: max_length - 1] + "…"
    return '"' + "".join(map(_visible, cut)) + '"'


def token_text(token: Token) -> str:
    """What a token spells; its id if it spells nothing. Bytes of a cut character as \\xNN."""
    if not token.piece:
        return f"#{token.id}"
    return quoted(token.piece.decode("utf-8", "backslashreplace"), 24)


def percent(share: float) -> str:
    """A share as whole percent; what is small is not nothing, what is nearly all not all."""
    if 0 < share < 0.005:
        return "<1 %"
    if 0.995 <= share < 1:
        return ">99 %"
    return f"{share * 100:.0f} %"


def probability(value: float) -> str:
    """Two digits after the point; what is not 0 or 1 does not read as if it were."""
    if 0 < value < 0.005:
        return "<0.01"
    if 0.995 <= value < 1:
        return ">0.99"
    return f"{value:.2f}"


def counted(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`, `1,200 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def positions(first: int, last: int) -> str:
    """`7`, or `0-15`."""
    return str(first) if first == last else f"{first}-{last}"


def _visible(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if unicodedata.category(character) in _HIDDEN:
        return f"\\u{ord(character):04x}"
    return character
