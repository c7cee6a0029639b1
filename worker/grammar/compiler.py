"""Compiles grammars off the engine's thread, and keeps the last ones by their hash.

No thread and no process starts before the first request for one.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from worker.grammar.matcher import CompiledGrammar, compiled
from worker.grammar.source import GrammarError, GrammarSource
from worker.grammar.tokens import TokenTable
from worker.grammar.trial import Trial

if TYPE_CHECKING:
    from llguidance import LLTokenizer

LIBRARY = "llguidance"
NUM_THREADS = 2
MAX_KEPT = 32
MAX_KEPT_BYTES = 1024 * 1024
MAX_PENDING = 64


class TooManyGrammarsError(Exception):
    """So many grammars wait to be compiled that one more must go elsewhere."""


class Ticket(Protocol):
    """A claim to a grammar that is being compiled."""

    @property
    def is_done(self) -> bool: ...
    def result(self) -> CompiledGrammar:
        """The grammar, once it is done. Raises GrammarError."""
        ...

    def cancel(self) -> None:
        """Nobody waits for it here any more. Idempotent."""
        ...


@dataclass(slots=True, eq=False)
class _Entry:
    """One grammar: kept, or on its way to `claims` requests."""

    source: GrammarSource
    future: Future[CompiledGrammar]
    claims: int = 0

    @property
    def is_spent(self) -> bool:
        """Whether it is of no more use for new outputs."""
        future = self.future
        if not future.done() or future.cancelled() or future.exception() is not None:
            return future.cancelled()
        return future.result().is_spent


@dataclass(slots=True)
class _Claim:
    entry: _Entry
    release: Callable[[_Entry], None]
    held: bool = field(default=True)

    @property
    def is_done(self) -> bool:
        return self.entry.future.done()

    def result(self) -> CompiledGrammar:
        self.cancel()
        try:
            return self.entry.future.result(timeout=0)
        except CancelledError:
            raise GrammarError("the worker is stopping") from None

    def cancel(self) -> None:
        if self.held:
            self.held = False
            self.release(self.entry)


class GrammarCompiler:
    """A context manager; leaving it ends what it started. `request` is for one thread.

    The vocabulary is indexed at once, before anything else runs: that holds the interpreter's
    lock for 0.2 s with 50,000 ids, 2.5 s with 260,000.

    `on_done` is called, on another thread, whenever a grammar is done or has failed. `trial`
    makes the judge that each grammar passes first, one for each compiling thread.
    """

    def __init__(
        self,
        table: TokenTable,
        on_done: Callable[[], None],
        *,
        trial: Callable[[TokenTable], Trial] = Trial,
        num_threads: int = NUM_THREADS,
        max_kept: int = MAX_KEPT,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._table = table
        self._on_done = on_done
        self._trial = trial
        self._max_kept = max_kept
        self._max_pending = max_pending
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._own = threading.local()
        self._trials = ExitStack()
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
        self._trials.close()

    def request(self, source: GrammarSource) -> Ticket:
        """A claim to the compiled grammar, which may be done already.

        Raises GrammarError if this worker compiles none, TooManyGrammarsError.
        """
        if self._tokenizer is None:
            raise GrammarError(self._problem)
        entry = self._entries.get(source.digest)
        if entry is None or entry.is_spent:
            entry = self._entries[source.digest] = self._begin(source, self._tokenizer)
        self._entries.move_to_end(source.digest)
        entry.claims += 1
        self._drop_oldest()
        return _Claim(entry, self._release)

    def _begin(self, source: GrammarSource, tokenizer: "LLTokenizer") -> _Entry:
        pending = sum(not entry.future.done() for entry in self._entries.values())
        if pending >= self._max_pending:
            raise TooManyGrammarsError(f"{pending} grammars are being compiled")
        future = self._pool.submit(self._compile, source, tokenizer)
        future.add_done_callback(lambda _: self._on_done())
        return _Entry(source, future)

    def _release(self, entry: _Entry) -> None:
        """Give a claim back; what nobody waits for is not begun."""
        entry.claims -= 1
        if not entry.claims and entry.future.cancel():
            del self._entries[entry.source.digest]

    def _drop_oldest(self) -> None:
        """Those still being compiled stay: they are bounded themselves."""
        kept = [entry for entry in self._entries.values() if entry.future.done()]
        num_bytes = sum(entry.source.num_bytes for entry in kept)
        while len(kept) > self._max_kept or num_bytes > MAX_KEPT_BYTES:
            oldest = kept.pop(0)
            num_bytes -= oldest.source.num_bytes
            del self._entries[oldest.source.digest]

    def _compile(self, source: GrammarSource, tokenizer: "LLTokenizer") -> CompiledGrammar:
        self._thread_trial().check(source)
        return compiled(tokenizer, source)

    def _thread_trial(self) -> Trial:
        trial: Trial | None = getattr(self._own, "trial", None)
        if trial is None:
            trial = self._own.trial = self._trial(self._table)
            self._trials.enter_context(trial)
        return trial


def _indexed(table: TokenTable) -> "tuple[LLTokenizer | None, str]":
    """The index of the vocabulary, or why there is none."""
    if find_spec(LIBRARY) is None:
        return None, f"not supported by this worker: {LIBRARY} is not installed"
    try:
        return table.tokenizer(), ""
    except GrammarError as error:
        return None, f"not supported by this worker: {error}"
