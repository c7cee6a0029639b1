"""Whoever can be asked."""

from typing import Protocol

from bench.load.outcome import Outcome
from bench.load.workload import Request


class Target(Protocol):
    """A chat server. An async context manager opens its connections around this."""

    async def ask(self, request: Request, outcome: Outcome) -> None:
        """Ask and read to the end, filling in the outcome; a failure is an outcome too."""
        ...
