"""Whose grammar is compiled next: tenants take turns, each with its own in order of arrival."""

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Lines by salt, taken from round robin (Nagle 1985, RFC 970). For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The salt whose turn is next stands first; none has an empty line.
        self._lines: OrderedDict[bytes, deque[T]] = OrderedDict()

    def put(self, salt: bytes, job: T) -> None:
        """A job for the end of its salt's line."""
        with self._lock:
            self._lines.setdefault(salt, deque()).append(job)

    def take(self) -> T | None:
        """The next job; None if there is none."""
        with self._lock:
            if not self._lines:
                return None
            salt, line = self._lines.popitem(last=False)
            job = line.popleft()
            if line:
                self._lines[salt] = line
            return job

    def remove(self, salt: bytes, job: T) -> None:
        """Take a job out; one that is not here any more is passed over."""
        with self._lock:
            line = self._lines.get(salt, deque())
            if job in line:
                line.remove(job)
                if not line:
                    del self._lines[salt]

    def clear(self) -> list[T]:
        """All that were left."""
        with self._lock:
            lines, self._lines = self._lines, OrderedDict()
        return [job for line in lines.values() for job in line]
