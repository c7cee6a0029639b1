"""Compiles grammars off the engine's thread, anew for each request and once for its choices.

Requests share nothing: what one of them has made a grammar's states grow to must not end
another. What is kept is whether a grammar has passed its trial; what has is compiled here by
the same steps, and so in the trial's time. No thread and no process starts before the first
request for one.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self
from weakref import WeakSet

from worker.grammar.matcher import CompiledGrammar, Matcher, compiled
from worker.grammar.source import CompilerFailedError, GrammarError, GrammarSource
from worker.grammar.tokens import TokenTable
from worker.grammar.trial import Trial
from worker.grammar.turns import Turns

if TYPE_CHECKING:
    from llguidance import LLTokenizer

LIBRARY = "llguidance"
NUM_THREADS = 2
MAX_VERDICTS = 1024
MAX_PENDING = 64
# Of one salt, so that nobody's grammars keep all others waiting.
MAX_PENDING_OF_ONE = 32
# Requests that have a compiled grammar or wait for one: each may come to hold 20 MB.
MIN_LIVE, MAX_LIVE = 64, 256


def max_live(max_num_seqs: int) -> int:
    """How many requests may have a grammar where so many sequences run."""
    return min(max(MIN_LIVE, 2 * max_num_seqs), MAX_LIVE)


class TooManyGrammarsError(Exception):
    """So many grammars are compiled or in use that one more must wait elsewhere."""


class Ticket(Protocol):
    """A claim to matchers that are being made."""

    @property
    def is_done(self) -> bool: ...
    def result(self) -> list[Matcher]:
        """The matchers, once they are done. Raises GrammarError, CompilerFailedError."""
        ...

    def cancel(self) -> None:
        """Nobody waits for it any more. Idempotent."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class _Job:
    """A grammar to compile for so many choices, and the place of what comes of it."""

    source: GrammarSource
    count: int
    future: Future[list[Matcher]]


@dataclass(frozen=True, slots=True)
class _Claim:
    future: Future[list[Matcher]]
    withdraw: Callable[[], None]

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def result(self) -> list[Matcher]:
        try:
            return self.future.result(timeout=0)
        except CancelledError:
            raise CompilerFailedError("the worker is stopping") from None

    def cancel(self) -> None:
        if self.future.cancel():
            self.withdraw()


class GrammarCompiler:
    """A context manager; leaving it ends what it started. `request` is for one thread.

    The vocabulary is indexed at once, before anything else runs: that holds the interpreter's
    lock for 0.2 s with 50,000 ids, 2.5 s with 260,000.

    `on_done` is called, on another thread, whenever matchers are done or have failed. `trial`
    makes the judge that each grammar passes first, one for each compiling thread. Salts take
    turns at the threads.
    """

    def __init__(
        self,
        table: TokenTable,
        on_done: Callable[[], None],
        *,
        trial: Callable[[TokenTable], Trial] = Trial,
        num_threads: int = NUM_THREADS,
        max_pending: int = MAX_PENDING,
        max_pending_of_one: int = MAX_PENDING_OF_ONE,
        max_live: int = MAX_LIVE,
    ) -> None:
        self._table = table
        self._on_done = on_done
        self._trial = trial
        self._max_pending = max_pending
        self._max_pending_of_one = max_pending_of_one
        self._max_live = max_live
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._turns: Turns[_Job] = Turns()
        # One that nobody waits for any more counts until its thread is free of it.
        self._pending: dict[Future[list[Matcher]], bytes] = {}
        self._counting = threading.Lock()
        # Those that anybody still has a matcher of.
        self._live: WeakSet[CompiledGrammar] = WeakSet()
        self._verdicts = Verdicts()
        self._own = threading.local()
        self._trials: list[Trial] = []
        self._closing, self._is_closed = threading.Lock(), False
        self._tokenizer, self._problem = _indexed(table)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for job in self._turns.clear():
            job.future.cancel()
        with self._closing:
            self._is_closed = True
        for trial in self._trials:
            trial.stop()

    def request(self, source: GrammarSource, count: int = 1, salt: bytes = b"") -> Ticket:
        """A claim to `count` matchers of a grammar, for a tenant's `salt`.

        Raises GrammarError if this worker compiles none, TooManyGrammarsError.
        """
        if self._tokenizer is None:
            raise GrammarError(self._problem)
        job = _Job(source, count, Future())
        with self._counting:
            self._check_room(salt)
            self._pending[job.future] = salt
        # Not by way of the job: what holds itself is not let go of when it should be.
        job.future.add_done_callback(self._settle)
        self._turns.put(salt, job)
        tokenizer = self._tokenizer
        try:
            self._pool.submit(lambda: self._take_turn(tokenizer))
        except RuntimeError:
            # No thread can be started, or the worker is stopping.
            self._turns.remove(salt, job)
            job.future.set_exception(CompilerFailedError("no thread to compile on"))
        return _Claim(job.future, lambda: self._turns.remove(salt, job))

    def _check_room(self, salt: bytes) -> None:
        """Raises TooManyGrammarsError with both numbers."""
        pending, own = len(self._pending), sum(each == salt for each in self._pending.values())
        live = pending + len(self._live)
        for number, most, what in (
            (pending, self._max_pending, "grammars are being compiled"),
            (own, self._max_pending_of_one, "grammars of one tenant are being compiled"),
            (live, self._max_live, "requests have a grammar"),
        ):
            if number >= most:
                raise TooManyGrammarsError(f"{number} {what}, at most {most}")

    def _settle(self, future: "Future[list[Matcher]]") -> None:
        """It is done, or nobody wants it: nothing of it is kept here."""
        with self._counting:
            del self._pending[future]
        self._on_done()

    def _take_turn(self, tokenizer: "LLTokenizer") -> None:
        """Compile whatever is next; there is nothing where its claim was given up."""
        job = self._turns.take()
        if job is None or not job.future.set_running_or_notify_cancel():
            return
        try:
            matchers = self._compile(job.source, job.count, tokenizer)
        except Exception as error:
            job.future.set_exception(error)
        else:
            job.future.set_result(matchers)

    def _compile(
        self, source: GrammarSource, count: int, tokenizer: "LLTokenizer"
    ) -> list[Matcher]:
        """Raises GrammarError, CompilerFailedError."""
        try:
            self._judge(source)
            grammar = compiled(tokenizer, source)
            self._live.add(grammar)
            return [grammar.matcher() for _ in range(count)]
        except (GrammarError, CompilerFailedError):
            raise
        except BaseException as error:
            # A panic of the library is no Exception. Neither may reach the engine.
            raise CompilerFailedError(type(error).__name__) from None

    def _judge(self, source: GrammarSource) -> None:
        """Try it in the child, unless its verdict is known. An accident is no verdict."""
        problem = self._verdicts.get(source.digest)
        if problem is None:
            problem = self._tried(source)
            self._verdicts.put(source.digest, problem)
        if problem:
            raise GrammarError(problem)

    def _tried(self, source: GrammarSource) -> str:
        try:
            self._thread_trial().check(source)
        except GrammarError as error:
            return str(error)
        return ""

    def _thread_trial(self) -> Trial:
        trial: Trial | None = getattr(self._own, "trial", None)
        if trial is None:
            with self._closing:
                if self._is_closed:
                    raise CompilerFailedError("the worker is stopping")
                trial = self._own.trial = self._trial(self._table)
                self._trials.append(trial)
        return trial


class Verdicts:
    """What the last grammars' trials said, by their hash: "" if all is well. For any thread."""

    def __init__(self, most: int = MAX_VERDICTS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._problems: OrderedDict[bytes, str] = OrderedDict()

    def get(self, digest: bytes) -> str | None:
        with self._lock:
            if digest in self._problems:
                self._problems.move_to_end(digest)
            return self._problems.get(digest)

    def put(self, digest: bytes, problem: str) -> None:
        with self._lock:
            self._problems[digest] = problem
            if len(self._problems) > self._most:
                self._problems.popitem(last=False)


def _indexed(table: TokenTable) -> "tuple[LLTokenizer | None, str]":
    """The index of the vocabulary, or why there is none."""
    if find_spec(LIBRARY) is None:
        return None, f"not supported by this worker: {LIBRARY} is not installed"
    try:
        return table.tokenizer(), ""
    except GrammarError as error:
        return None, f"not supported by this worker: {error}"
