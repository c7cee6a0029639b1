"""Writing to a person's terminal."""

import contextlib
import io
import sys
import unicodedata
from typing import TextIO, cast

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


class _BestEffort(io.TextIOBase):
    """See `best_effort`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override] # of a stream that may be none
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def best_effort(stream: TextIO) -> TextIO:
    """The stream for people, who may leave: what can no longer be written is dropped.

    What is to be done after telling something must not depend on anybody reading it.
    """
    return cast(TextIO, _BestEffort(stream))


def tell(line: str) -> None:
    """Write a line to the standard error, if anybody still reads it."""
    click.echo(line, file=best_effort(sys.stderr))


def one_line(text: str) -> str:
    """The text on one line."""
    return " ".join(printable(text).split())
