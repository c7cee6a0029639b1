"""Runs an engine on a thread of its own: submits and aborts go in, outputs come out.

Everything that touches torch happens on that thread, loading included: OpenMP keeps a
pool of threads per calling thread, and two pools on the same cores stall each other.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from time import monotonic
from types import TracebackType
from typing import Generic, Self, TypeVar

from worker.engine import Engine
from worker.engine_output import EngineLoad, EngineOutput
from worker.sequence import Sequence

Facts = TypeVar("Facts")
# How long a published pace of tokens says something; see `TokenRate`.
_RATE_LIFE_S = 1.0


class EngineStoppedError(Exception):
    """The thread was told to stop while its engine was being built."""


class EngineThread(Generic[Facts]):
    """A context manager: inside it the thread runs; leaving it tells the thread to stop.

    `build` makes the engine, on the thread, and tells what others must know of it.
    `on_output` is called on the thread with every output that holds something, also before
    a step with sequences that it is the first of. `ready`
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
        # Submits (with the time of their arrival) and aborts, in the order in which they came.
        self._inbox: list[tuple[Sequence, float] | int] = []
        self._woken = False
        self._stopping = False
        self._step_started: float | None = None
        self._load, self._load_since = EngineLoad(), clock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.ready: Future[Facts] = Future()
        self.crashed: Future[BaseException] = Future()
        for future in (self.ready, self.crashed):
            # From here on nobody who waits can cancel it under the thread's hands.
            future.set_running_or_notify_cancel()

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

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; whether it came. A step cannot be interrupted."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def raise_if_stopping(self) -> None:
        """For `build`, between its parts: raises EngineStoppedError."""
        if self._stopping:
            raise EngineStoppedError

    @property
    def load(self) -> EngineLoad:
        """The last published load; safe to read from any thread."""
        load = self._load
        if load.tokens_per_second and self._clock() - self._load_since > _RATE_LIFE_S:
            return replace(load, tokens_per_second=0.0)
        return load

    def step_age_s(self) -> float:
        """For how long the step now running has been running; 0 when none is."""
        started = self._step_started
        return 0.0 if started is None else self._clock() - started

    def submit(self, sequence: Sequence) -> None:
        """Hand a sequence over; its outcome comes with an output."""
        self._tell((sequence, self._clock()))

    def abort(self, sequence_id: int) -> None:
        """End a sequence no later than at the end of the step now running. Idempotent."""
        self._tell(sequence_id)

    def wake(self) -> None:
        """Let the engine look at what it waits for, though nothing was told."""
        with self._news:
            self._woken = True
            self._news.notify()

    def _tell(self, news: tuple[Sequence, float] | int) -> None:
        with self._news:
            self._inbox.append(news)
            self._news.notify()

    def _run(self) -> None:
        try:
            engine, facts = self._build()
            self._publish(engine.load())
        except BaseException as error:
            self.ready.set_exception(error)
            return
        self.ready.set_result(facts)
        try:
            self._loop(engine)
        except BaseException as error:
            self.crashed.set_result(error)

    def _loop(self, engine: Engine) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._has_news or engine.has_work, engine.patience_s())
                if self._stopping:
                    return
            self._intake(engine)
            self._step_started = self._clock()
            output = engine.step(lambda: self._intake(engine), self._on_output)
            self._step_started = None
            self._publish(output.load)
            if not output.is_empty:
                self._on_output(output)

    @property
    def _has_news(self) -> bool:
        return bool(self._inbox) or self._woken or self._stopping

    def _publish(self, load: EngineLoad) -> None:
        self._load_since = self._clock()
        self._load = load

    def _intake(self, engine: Engine) -> None:
        with self._news:
            inbox, self._inbox = self._inbox, []
            self._woken = False
        for news in inbox:
            if isinstance(news, int):
                engine.abort(news)
            else:
                engine.submit(*news)
