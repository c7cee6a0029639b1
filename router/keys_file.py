"""A file of keys and tenants, read again whenever it changes."""

import os
from pathlib import Path

from router.auth import Keys
from router.keys_format import MAX_BYTES, KeysFormatError, parse_keys


class KeysFile:
    """One file. `methods` are the names that a tenant's `methods` may hold."""

    def __init__(self, path: Path, methods: frozenset[str]) -> None:
        self._path = path
        self._methods = methods
        self._seen: tuple[int, ...] = ()

    def poll(self) -> Keys | None:
        """All its keys if it has changed since the last call, else None; reads the disk.

        Raises KeysFormatError, once for each state in which the file cannot be used.
        """
        try:
            content = self._changed_content()
        except OSError as error:
            self._note_unreadable(error)
            return None
        return None if content is None else parse_keys(content, self._methods)

    def _changed_content(self) -> bytes | None:
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            mark = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if mark == self._seen:
                return None
            # Taken before the content is: what is written meanwhile changes the next mark.
            self._seen = mark
            return file.read(MAX_BYTES + 1)

    def _note_unreadable(self, error: OSError) -> None:
        mark = (error.errno or 0,)
        if mark != self._seen:
            self._seen = mark
            raise KeysFormatError(f"cannot be read: {error.strerror}") from None
