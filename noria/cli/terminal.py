"""Writing to a person's terminal."""

import sys
import unicodedata

import click

_KEPT = "\n\t"


def printable(text: str) -> str:
    """The text with control characters made visible: a reply must not steer the terminal."""
    return "".join(
        c if c in _KEPT or unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )


def write_piece(text: str) -> None:
    """Write a piece of a reply at once: as it is into a pipe or file, harmless on a terminal."""
    shown = printable(text) if sys.stdout.isatty() else text
    click.echo(shown, nl=False, color=True)


def one_line(text: str) -> str:
    """The text on one line."""
    return " ".join(printable(text).split())
