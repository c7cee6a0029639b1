"""A request's stream of output ids: it waits for a worker, then follows its attempt.

One object from the queue to the last id, held by the request as a context manager.
Whatever ends the request, leaving the block gives the place in the queue back or
aborts the attempt. What the worker holds for an aborted attempt is counted by
`WorkerState` until the worker says that it is over.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from noria.reasons import Reason, RequestError
from router.queue import Permit
from router.requests import Generation
from router.worker_news import Finish, NewTokens, Refusal, Work, WorkerReport

MAX_REPLACEMENTS = 3


class TokenSink(Protocol):
    """Whoever turns ids into an answer; called synchronously.

    Every `on_placed` is followed by one `on_attempt_ended` or `on_attempt_lost`, which may
    come after `withdraw`; beside them only `on_wasted` may, once: ids of an attempt that was
    given up, which its worker computed all the same.
    """

    def on_queued(self, position: int) -> None: ...

    def on_placed(self, worker_id: str, routing_note: str) -> None: ...

    def on_tokens(self, new: NewTokens) -> None: ...

    def on_report(self, report: WorkerReport) -> None: ...

    def on_finished(self, choice: int, finish: Finish) -> None: ...

    def on_wasted(self, num_tokens: int) -> None: ...

    def on_attempt_ended(self, work: Work) -> None: ...

    def on_attempt_lost(self, received_tokens: int) -> None: ...

    def on_failed(self, error: RequestError) -> None: ...


class AttemptPort(Protocol):
    """The side of a worker that a placed stream talks to."""

    @property
    def worker_id(self) -> str: ...

    def abort(self, submit_number: int) -> None: ...

    def abort_choice(self, submit_number: int, choice: int) -> None: ...


class Line(Protocol):
    """Where streams wait for a worker."""

    def enqueue(self, stream: "TokenStream") -> None: ...

    def put_back(self, stream: "TokenStream") -> None: ...

    def may_retry(self, stream: "TokenStream") -> bool: ...


class TokenStream:
    """One request's ids, from whichever worker. `attempts` counts placements so far.

    `failed_at` has the workers that failed it; others are asked first.
    """

    def __init__(
        self, generation: Generation, permit: Permit["TokenStream"], sink: TokenSink, line: Line
    ) -> None:
        self.generation = generation
        self.permit = permit
        self.attempts = 0
        self.failed_at: list[AttemptPort] = []
        self._sink = sink
        self._line = line
        self._worker: AttemptPort | None = None
        self._submit_number = 0
        self._replacements = 0
        self._num_tokens = 0
        self._finished: set[int] = set()
        self._withdrawn: set[int] = set()
        self._over = False

    def __enter__(self) -> "TokenStream":
        try:
            self._line.enqueue(self)
        except BaseException:
            self.withdraw()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.withdraw()

    def withdraw(self) -> None:
        """Want nothing more: leave the queue, or abort at the worker. Idempotent."""
        self._over = True
        self.permit.leave()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.abort(self._submit_number)

    def withdraw_choice(self, choice: int) -> None:
        """Want nothing more of one choice; the others go on. One that has ended is ignored."""
        if self._worker is not None and choice not in self._finished:
            self._finished.add(choice)
            self._withdrawn.add(choice)
            self._worker.abort_choice(self._submit_number, choice)

    def queue(self, position: int) -> None:
        """It stands in line, with so many others in front."""
        self._sink.on_queued(position)

    @property
    def has_begun(self) -> bool:
        """Whether a token has come: from then on it is bound to its worker."""
        return self._num_tokens > 0

    def place(self, worker: AttemptPort, submit_number: int, routing_note: str) -> None:
        """A worker has been given the request under this number, for the reasons noted."""
        self._worker, self._submit_number = worker, submit_number
        self._sink.on_placed(worker.worker_id, routing_note)

    def deliver(self, new: NewTokens) -> None:
        """New output ids, in order."""
        if not self._over:
            self._num_tokens += len(new.token_ids)
            self._sink.on_tokens(new)
        if new.finish is not None and not self._over:
            self._finish_choice(new.choice, new.finish)

    def waste(self, num_tokens: int) -> None:
        """A given-up attempt has computed so many ids that nobody received."""
        if num_tokens > 0:
            self._sink.on_wasted(num_tokens)

    def count(self, work: Work) -> None:
        """An attempt has ended, wanted or not, and cost this much."""
        self._sink.on_attempt_ended(work)

    def count_lost(self, received_tokens: int) -> None:
        """An attempt is gone with its session; so many ids had come of it."""
        self._sink.on_attempt_lost(received_tokens)

    def finish(self, finishes: Sequence[Finish], report: WorkerReport) -> None:
        """The worker's last entry for an attempt that ran; why each choice ended."""
        self._worker = None
        if self._over:
            return
        self._sink.on_report(report)
        wanted = [f for choice, f in enumerate(finishes) if choice not in self._withdrawn]
        if Finish.ABORTED in wanted or len(finishes) != self.generation.num_choices:
            self.lose()
        elif Finish.EXPIRED in wanted:
            self._fail(RequestError(Reason.DEADLINE_EXCEEDED, "the deadline passed"))
        else:
            self._over = True
            for choice, finish in enumerate(finishes):
                self._finish_choice(choice, finish)

    def refuse(self, refusal: Refusal, message: str, field: str) -> None:
        """The worker's last entry for an attempt that did not run, or could not go on."""
        worker, self._worker = self._worker, None
        if self._over:
            return
        match refusal:
            case Refusal.FULL if not self._num_tokens:
                self._line.put_back(self)
            case Refusal.FULL | Refusal.DRAINING:
                self.lose()
            case Refusal.INVALID:
                fields = ((field, message),) if field else ()
                self._fail(RequestError(Reason.INVALID_FIELD, message, fields=fields))
            case Refusal.INTERNAL if self._may_retry(worker):
                self.lose()
            case Refusal.INTERNAL:
                self._fail(RequestError(Reason.INTERNAL, "the worker failed"))

    def lose(self) -> None:
        """The attempt is gone. Without a token so far it is placed again, a few times."""
        self._worker = None
        if self._over:
            return
        if self._num_tokens:
            lost = f"the worker was lost after {self._num_tokens} output tokens"
            self._fail(RequestError(Reason.WORKER_LOST, lost))
        elif self._replacements == MAX_REPLACEMENTS:
            lost = f"{1 + MAX_REPLACEMENTS} attempts were lost before their first token"
            self._fail(RequestError(Reason.WORKER_LOST, lost))
        else:
            self._replacements += 1
            self._line.put_back(self)

    def leave(self) -> None:
        """Give the attempt up before its first token, and be placed again elsewhere."""
        worker = self._worker
        if worker is not None:
            worker.abort(self._submit_number)
        self.lose()

    def give_up(self, error: RequestError) -> None:
        """End a stream that still waits."""
        if not self._over:
            self._fail(error)

    def _finish_choice(self, choice: int, finish: Finish) -> None:
        if choice not in self._finished:
            self._finished.add(choice)
            self._sink.on_finished(choice, finish)

    def _may_retry(self, failed: AttemptPort | None) -> bool:
        """Whether a worker's failure before the first token may be answered by another try."""
        if failed is not None:
            self.failed_at.append(failed)
        tries_left = self._replacements < MAX_REPLACEMENTS and not self._num_tokens
        return tries_left and self._line.may_retry(self)

    def _fail(self, error: RequestError) -> None:
        self._over = True
        self.permit.leave()
        self._sink.on_failed(error)
