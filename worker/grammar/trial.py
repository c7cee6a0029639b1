"""A grammar is compiled in a child process first.

A few lines of schema can make the compiler run for hours or take all memory, and nothing
can interrupt it in a thread. What does that ends a child, and is refused.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any, Self

from worker.grammar import problems
from worker.grammar.source import CompilerFailedError, GrammarError, GrammarSource
from worker.grammar.tokens import TokenTable
from worker.grammar.trial_process import read_frame, table_frame, write_frame

COMPILE_SECONDS = 0.5
# On a busy machine a second of computing takes several.
_PATIENCE = 10.0
_START_SECONDS = 60.0
_STOP_SECONDS = 5.0
# How a child ends that a grammar brought to its limits of time, memory and depth.
_BY_THE_GRAMMAR = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)


class Trial:
    """A context manager around the child, which starts with the first grammar, and anew after
    one that ended it. Call it from one thread; `stop` from any.

    `compile_s` is the computing time of one grammar, in seconds.
    """

    def __init__(self, table: TokenTable, compile_s: float = COMPILE_SECONDS) -> None:
        self._table = table
        self._compile_s = compile_s
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = False
        # Held while the child is started, and while its pipes are used.
        self._starting, self._using = threading.Lock(), threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the child, and start none any more; whoever waits for it is told at once."""
        with self._starting:
            self._stopped = True
            if self._child is not None:
                self._child.kill()
        if self._using.acquire(timeout=_STOP_SECONDS):
            with contextlib.ExitStack() as held:
                held.callback(self._using.release)
                self._end()

    def check(self, source: GrammarSource) -> None:
        """Raises GrammarError for what does not compile, or not within its limits, and
        CompilerFailedError for an accident.
        """
        with self._using:
            self._start()
            frame = [source.kind, source.texts, self._compile_s]
            problem = self._answer(frame, self._compile_s * _PATIENCE)
        if problem:
            raise GrammarError(problem)

    def _start(self) -> None:
        if self._child is not None:
            return
        with self._starting:
            if self._stopped:
                raise CompilerFailedError("the worker is stopping")
            # What it writes on its standard error could quote a grammar.
            self._child = subprocess.Popen(
                [sys.executable, "-m", "worker.grammar.trial_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        try:
            problem = self._answer(table_frame(self._table), _START_SECONDS)
        except GrammarError as error:
            problem = str(error)
        if problem:
            # No grammar's fault: it has not been read yet.
            self._end()
            raise CompilerFailedError(problem)

    def _answer(self, frame: Any, patience_s: float) -> str:
        """The child's answer. One that gives none in time is killed, and so always ends."""
        child = self._child
        if child is None or child.stdin is None or child.stdout is None:
            raise CompilerFailedError("the compiler's process is gone")
        watch = threading.Timer(patience_s, child.kill)
        watch.start()
        try:
            with contextlib.suppress(OSError):
                write_frame(child.stdin, frame)
                answer: str | None = read_frame(child.stdout)
                if answer is not None:
                    return answer
        except BaseException:
            # Nobody may read what it says late.
            self._end()
            raise
        finally:
            watch.cancel()
        status = child.wait()
        self._end()
        if status in _BY_THE_GRAMMAR:
            raise GrammarError(f"{problems.TOO_COMPLEX} to compile in {self._compile_s:g} s")
        raise CompilerFailedError("the compiler's process ended")

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
