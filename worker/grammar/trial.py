"""A grammar is compiled in a child process first.

A few lines of schema can make the compiler run for hours or take all memory, and nothing
can interrupt it in a thread. What does that ends a child, and is refused.
"""

import contextlib
import os
import selectors
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

from worker.grammar import problems
from worker.grammar.source import GrammarError, GrammarSource
from worker.grammar.tokens import TokenTable
from worker.grammar.trial_process import read_frame, table_frame, write_frame

COMPILE_SECONDS = 2.0
# On a busy machine a second of computing takes several.
_PATIENCE = 5.0
_START_SECONDS = 60.0


class Trial:
    """A context manager around the child, which starts with the first grammar, and anew after
    one that ended it. Call it from one thread.

    `compile_s` is the computing time of one grammar, in seconds.
    """

    def __init__(self, table: TokenTable, compile_s: float = COMPILE_SECONDS) -> None:
        self._table = table
        self._compile_s = compile_s
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def check(self, source: GrammarSource) -> None:
        """Raises GrammarError for what does not compile, or not within its limits."""
        self._start()
        frame = [source.kind, source.texts, self._compile_s]
        problem = self._answer(frame, self._compile_s * _PATIENCE)
        if problem is None:
            raise GrammarError(f"{problems.TOO_COMPLEX} to compile in {self._compile_s:g} s")
        if problem:
            raise GrammarError(problem)

    def _start(self) -> None:
        if self._child is not None:
            return
        # What it writes on its standard error could quote a grammar.
        self._child = subprocess.Popen(
            [sys.executable, "-m", "worker.grammar.trial_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        problem = self._answer(table_frame(self._table), _START_SECONDS)
        if problem is None:
            raise GrammarError("the compiler's process did not start")
        if problem:
            self._end()
            raise GrammarError(problem)

    def _answer(self, frame: Any, patience_s: float) -> str | None:
        """The child's answer; None, and no child any more, if it gave none in time."""
        child = self._child
        if child is None or child.stdin is None or child.stdout is None:
            return None
        with contextlib.suppress(OSError):
            write_frame(child.stdin, frame)
            with selectors.DefaultSelector() as selector:
                selector.register(child.stdout, selectors.EVENT_READ)
                if selector.select(patience_s):
                    answer: str | None = read_frame(child.stdout)
                    if answer is not None:
                        return answer
        self._end()
        return None

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        child.wait()
