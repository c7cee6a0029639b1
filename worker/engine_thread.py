"""Runs an engine on a thread of its own: submits and aborts go in, outputs come out.

Everything that touches torch happens on that thread, loading included: OpenMP keeps a
pool of threads per calling thread, and two pools on the same cores stall each other.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from types import TracebackType
from typing import Generic, Self, TypeVar

from worker.engine import Engine, EngineLoad, EngineOutput
from worker.sequence import Sequence

_JOIN_S = 5.0
Facts = TypeVar("Facts")


class EngineThread(Generic[Facts]):
    """A context manager: inside it the thread runs; leaving it stops the thread.

    `build` makes the engine, on the thread, and tells what others must know of it.
    `on_output` is called on the thread with every output that holds something. `ready`
    resolves to those facts once the engine stands, or raises what `build` raised;
    `crashed` resolves with an error that ended the loop: the worker is then of no more use.
    """

    def __init__(
        self,
        build: Callable[[], tuple[Engine, Facts]],
        on_output: Callable[[EngineOutput], None],
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._build = build
        self._on_output = on_output
        self._clock = clock
        self._news = threading.Condition()
        self._submits: list[tuple[Sequence, float]] = []
        self._aborts: list[int] = []
        self._stopping = False
        self._step_started: float | None = None
        self._load = EngineLoad()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.ready: Future[Facts] = Future()
        self.crashed: Future[BaseException] = Future()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._news:
            self._stopping = True
            self._news.notify()
        # A step that never returns must not keep the process from ending.
        self._thread.join(_JOIN_S)

    @property
    def load(self) -> EngineLoad:
        """The last published load; safe to read from any thread."""
        return self._load

    def step_age_s(self) -> float:
        """For how long the step now running has been running; 0 when none is."""
        started = self._step_started
        return 0.0 if started is None else self._clock() - started

    def submit(self, sequence: Sequence) -> None:
        """Hand a sequence over; its outcome comes with an output."""
        with self._news:
            self._submits.append((sequence, self._clock()))
            self._news.notify()

    def abort(self, sequence_id: int) -> None:
        """End a sequence no later than at the end of the step now running. Idempotent."""
        with self._news:
            self._aborts.append(sequence_id)
            self._news.notify()

    def _run(self) -> None:
        try:
            engine, facts = self._build()
        except BaseException as error:
            self.ready.set_exception(error)
            return
        self._load = engine.load()
        self.ready.set_result(facts)
        try:
            self._loop(engine)
        except BaseException as error:
            self.crashed.set_result(error)

    def _loop(self, engine: Engine) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._has_news() or engine.has_work)
                if self._stopping:
                    return
            self._intake(engine)
            self._step_started = self._clock()
            output = engine.step(lambda: self._intake(engine))
            self._step_started = None
            self._load = output.load
            if not output.is_empty:
                self._on_output(output)

    def _has_news(self) -> bool:
        return bool(self._submits or self._aborts or self._stopping)

    def _intake(self, engine: Engine) -> None:
        # Submits first: an abort may be for one that arrived in the same breath.
        with self._news:
            submits, self._submits = self._submits, []
            aborts, self._aborts = self._aborts, []
        for sequence, arrived in submits:
            engine.submit(sequence, arrived)
        for sequence_id in aborts:
            engine.abort(sequence_id)
