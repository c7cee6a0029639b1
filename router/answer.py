"""One answer: ids from a worker go to the tokenizer, its text becomes events.

The synchronous heart of a request. Worker session and decode session call in; events
go to the client's outbox; an error interrupts the request. Nothing here waits.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from noria.reasons import RequestError
from router.delivery import Delivery
from router.events import (
    BlockStart,
    BlockStop,
    MessageEnd,
    MessageStart,
    MessageStop,
    StopReason,
    TextDelta,
)
from router.record import RequestRecord
from router.worker_news import Finish, NewTokens, WorkerReport

_STOP_REASONS = {
    Finish.EOS: StopReason.END_TURN,
    Finish.LENGTH: StopReason.MAX_TOKENS,
    Finish.STOP_ID: StopReason.STOP_SEQUENCE,
}


class IdsToText(Protocol):
    """A decode slot."""

    def feed(self, token_ids: Sequence[int]) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What stands before the first token."""

    request_id: str
    model: str
    input_tokens: int
    stop_sequences: tuple[str, ...]


class Answer:
    """Sink of one request's ids and of its text.

    `text_of` and `stop_worker` are bound once slot and stream exist; `fail` ends the
    request. The last id of an output that EOS or a stop id ended is counted, and never
    reaches the tokenizer: it is no text.
    """

    def __init__(
        self,
        head: AnswerHead,
        record: RequestRecord,
        delivery: Delivery,
        fail: Callable[[RequestError], None],
    ) -> None:
        self._head = head
        self._record = record
        self._delivery = delivery
        self._fail = fail
        self._slot: IdsToText | None = None
        self._stop_worker: Callable[[], None] = lambda: None
        self._started = False
        self._block_begun = False
        self._ended = False
        self._num_ids = 0
        self._output_tokens = 0
        self._stop_reason = StopReason.END_TURN
        # Records wait for the text of their ids: (ids that text must account for, record).
        self._steps: deque[tuple[int, object]] = deque()

    def bind(self, slot: IdsToText, stop_worker: Callable[[], None]) -> None:
        """Connect the decode slot, and how to stop the worker once a stop string matched."""
        self._slot = slot
        self._stop_worker = stop_worker

    # From the worker.

    def on_queued(self, position: int) -> None:
        self._record.queued(position)

    def on_placed(self, worker_id: str, routing_note: str) -> None:
        self._record.placed(worker_id, routing_note)
        self._steps.clear()
        if not self._started:
            self._started = True
            head = self._head
            self._delivery.put(MessageStart(head.request_id, head.model, head.input_tokens))

    def on_tokens(self, new: NewTokens) -> None:
        self._record.generated(new)
        accounted = self._num_ids
        for step in new.steps:
            accounted += step.chose_token
            self._steps.append((accounted, step.record))
        self._num_ids += len(new.token_ids)
        if self._slot is not None and not self._ended:
            self._slot.feed(new.token_ids[:-1] if new.last_is_end else new.token_ids)

    def on_report(self, report: WorkerReport) -> None:
        self._record.finished(report)

    def on_finished(self, finish: Finish, output_tokens: int) -> None:
        self._stop_reason = _STOP_REASONS[finish]
        self._output_tokens = output_tokens
        if self._slot is not None and not self._ended:
            self._slot.finish()

    def on_wasted(self, num_tokens: int) -> None:
        self._record.wasted(num_tokens)

    # From the tokenizer.

    def on_text(self, text: str, num_ids: int) -> None:
        if text and not self._ended:
            self._record.has_text_of(num_ids)
            self._put_delta(text, self._take_steps(num_ids))

    def on_stop(self, stop_index: int, token_index: int, duration_us: int) -> None:
        self._stop_worker()
        self._output_tokens = token_index + 1
        self._stop_reason = StopReason.STOP_SEQUENCE
        last_steps = self._take_steps(token_index + 1)
        self._end(self._head.stop_sequences[stop_index], last_steps, duration_us)

    def on_text_end(self, duration_us: int) -> None:
        self._end(None, [record for _, record in self._steps], duration_us)

    # From both.

    def on_failed(self, error: RequestError) -> None:
        if not self._ended:
            self._ended = True
            self._fail(error)

    def _end(self, stop_sequence: str | None, last_steps: list[object], duration_us: int) -> None:
        if self._ended:
            return
        self._record.text_ended(self._stop_reason, self._output_tokens, duration_us)
        if last_steps:
            self._put_delta("", last_steps)
        self._begin_block()
        self._ended = True
        self._delivery.put(BlockStop())
        self._delivery.put(MessageEnd(self._stop_reason, stop_sequence, self._record.usage))
        self._delivery.put(MessageStop())
        self._delivery.close()

    def _begin_block(self) -> None:
        if not self._block_begun:
            self._block_begun = True
            self._delivery.put(BlockStart())

    def _put_delta(self, text: str, steps: list[object]) -> None:
        self._begin_block()
        self._delivery.put(TextDelta(text, steps))
        overdue = self._delivery.overdue()
        if overdue is not None:
            self.on_failed(overdue)

    def _take_steps(self, num_ids: int) -> list[object]:
        taken = []
        while self._steps and self._steps[0][0] <= num_ids:
            taken.append(self._steps.popleft()[1])
        return taken
