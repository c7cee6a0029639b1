"""A batch's output: a line for each request that is done, and so the memory of what is."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

# Of every line that `append` writes.
_BEGINNING = b'{"line": '


class JournalError(ValueError):
    """A file that is no output of this batch, or that another batch is writing."""


class Journal:
    """`done` has the id of each input line that has a result, by its number."""

    def __init__(self, file: BinaryIO, done: dict[int, str]) -> None:
        self._file = file
        self.done = done

    def append(self, number: int, line_id: str, result: dict[str, Any]) -> None:
        """Keep a result. Once this returns, the death of this process does not undo it."""
        if number in self.done:
            raise ValueError(f"line {number} is done already")
        told = {"line": number, "id": line_id, **result}
        self._file.write(json.dumps(told, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.done[number] = line_id


@contextlib.contextmanager
def open_journal(path: Path) -> Iterator[Journal]:
    """The output file, with what earlier runs have done. Nobody else may write it meanwhile.

    What a killed run left of a last line is cut off: it was never told to be done. A file of
    anything else is left as it is. Raises JournalError, OSError.
    """
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(f"{path}: another batch is writing it") from None
        file.seek(0)
        done, whole = _read(path, file)
        file.truncate(whole)
        yield Journal(file, done)
        os.fsync(file.fileno())


def _read(path: Path, file: BinaryIO) -> tuple[dict[int, str], int]:
    """What is done, and the length of the whole lines."""
    done: dict[int, str] = {}
    whole = 0
    for raw in file:
        if not raw.endswith(b"\n"):
            if not (raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw)):
                raise JournalError(f"{path}: not the output of a batch")
            break
        whole += len(raw)
        try:
            result = json.loads(raw)
            number, line_id = int(result["line"]), str(result["id"])
        except (ValueError, KeyError, TypeError):
            raise JournalError(f"{path}: not the output of a batch") from None
        if number in done:
            raise JournalError(f"{path}: line {number} is there twice")
        done[number] = line_id
    return done, whole
