"""One answer: ids from a worker go to the tokenizer, its text becomes events.

The synchronous heart of a request. Worker session and decode sessions call in; events
go to the client's outbox; an error interrupts the request. Nothing here waits.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from noria.reasons import RequestError
from router.choice_answer import AnswerHead, ChoiceAnswer, IdsToText
from router.delivery import Delivery
from router.record import RequestRecord
from router.worker_news import Finish, NewTokens, Work, WorkerReport


class IdStream(Protocol):
    """Where the ids come from: what is withdrawn is computed no further."""

    def withdraw(self) -> None: ...

    def withdraw_choice(self, choice: int) -> None: ...


class Answer:
    """Sink of one request's ids; each of its choices is the sink of its own text.

    Slots and the worker's `ids` are bound once they exist; `fail` ends the request. What a
    stop string ends is stopped at the worker at once: a choice, and the rest with the last.
    """

    def __init__(
        self,
        head: AnswerHead,
        record: RequestRecord,
        delivery: Delivery,
        fail: Callable[[RequestError], None],
        num_choices: int = 1,
    ) -> None:
        self.choices = [
            ChoiceAnswer(index, head, record, delivery, self) for index in range(num_choices)
        ]
        self._record = record
        self._delivery = delivery
        self._fail = fail
        self._ids: IdStream | None = None
        self._started = False
        self._failed = False

    def bind(self, slots: Iterable[IdsToText], ids: IdStream) -> None:
        """Connect the choices' decode slots, and the stream that their ids come from."""
        for choice, slot in zip(self.choices, slots, strict=True):
            choice.slot = slot
        self._ids = ids

    # From the worker.

    def on_queued(self, position: int) -> None:
        self._record.queued(position)

    def on_placed(self, worker_id: str, routing_note: str) -> None:
        self._record.placed(worker_id, routing_note)
        for choice in self.choices:
            choice.begin_attempt()
            if not self._started:
                choice.start()
        self._started = True

    def on_tokens(self, new: NewTokens) -> None:
        self._record.generated(new)
        self.choices[new.choice].on_tokens(new)

    def on_report(self, report: WorkerReport) -> None:
        self._record.finished(report)

    def on_finished(self, choice: int, finish: Finish) -> None:
        self.choices[choice].on_finished(finish)

    def on_wasted(self, num_tokens: int) -> None:
        self._record.wasted(num_tokens)

    def on_attempt_ended(self, work: Work) -> None:
        self._record.account.attempt_ended(work)

    def on_attempt_lost(self, received_tokens: int) -> None:
        record = self._record
        record.account.attempt_lost(record.input_tokens, record.cached_tokens, received_tokens)

    # From the choices.

    def on_choice_ended(self, index: int, duration_us: int) -> bool:
        """A choice's text is complete; whether that of all is."""
        if self._failed:
            return False
        if not all(choice.ended for choice in self.choices):
            if self._ids is not None:
                self._ids.withdraw_choice(index)
            return False
        if self._ids is not None:
            self._ids.withdraw()
        self._record.text_ended(duration_us)
        return True

    # From all.

    def on_failed(self, error: RequestError) -> None:
        if self._failed or all(choice.ended for choice in self.choices):
            return
        self._failed = True
        for choice in self.choices:
            choice.ended = True
        self._fail(error)
