"""What is told of one request: outcome, counts, and where its time went.

Its timeline, its log line and what GetRequest shows are all made from this. It holds no
text, no ids and no key.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from noria.reasons import Reason
from noria.service.trace import NO_TRACE, TraceContext
from router.events import AnswerUsage, StopReason
from router.ledger.account import RequestAccount
from router.timeline import Phase, Reported, Timeline
from router.worker_news import NewTokens, WorkerReport


class RequestState(Enum):
    """Where a request is, or how it ended; named as `noria.v1.RequestState`."""

    QUEUED = auto()
    RUNNING = auto()
    SERVED = auto()
    REFUSED = auto()
    CANCELLED = auto()
    EXPIRED = auto()
    FAILED = auto()


_ENDED_AS = {
    None: RequestState.SERVED,
    Reason.CANCELLED: RequestState.CANCELLED,
    Reason.DEADLINE_EXCEEDED: RequestState.EXPIRED,
    Reason.INTERNAL: RequestState.FAILED,
    Reason.SLOW_READER: RequestState.FAILED,
    Reason.TOKENIZER_LOST: RequestState.FAILED,
    Reason.WORKER_LOST: RequestState.FAILED,
}
_BEFORE_FIRST_TOKEN = {Phase.BATCH_WAIT, Phase.PREFILL}
_RUNNING = {Phase.BATCH_WAIT, Phase.PREFILL, Phase.DECODE, Phase.DETOKENIZE, Phase.DELIVERY}


def _ignore(record: "RequestRecord", num_tokens: int) -> None:
    del record, num_tokens


@dataclass(slots=True)
class RequestRecord:
    """Filled in as the request goes on; each event moves the timeline's cursor.

    `clock` is the router's, in seconds; `accepted_unix_us` is for people. Of an unserved
    request, `output_tokens` counts those whose text was on its way to the client.

    Tokens still computed when a request ends early are heard of afterwards, if at all:
    `late_tokens` count as wasted where the record is read later, and `on_late` hears of
    them, but nothing of what was told at the end changes.
    """

    request_id: str
    clock: Callable[[], float]
    accepted_unix_us: int = 0
    on_late: "Callable[[RequestRecord, int], None]" = _ignore
    method: str = ""
    trace: TraceContext = NO_TRACE
    tenant: str = ""
    key_id: str = ""
    model: str = ""
    worker_id: str = ""
    routing_note: str = ""
    attempts: int = 0
    preemptions: int = 0
    seed: int | None = None
    queue_position: int | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_delta_us: int | None = None
    reason: Reason | None = None
    stop_reason: StopReason | None = None
    is_over: bool = False
    account: RequestAccount = field(default_factory=RequestAccount)
    timeline: Timeline = field(init=False)
    _outputs: dict[int, int] = field(default_factory=dict)
    late_tokens: int = 0
    _computed_tokens: int = 0
    _decode_us: int = 0

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.clock)

    @property
    def state(self) -> RequestState:
        if self.is_over and self.reason is Reason.DRAINING and self.attempts:
            return RequestState.FAILED
        if self.is_over:
            return _ENDED_AS.get(self.reason, RequestState.REFUSED)
        return RequestState.RUNNING if self.timeline.phase in _RUNNING else RequestState.QUEUED

    @property
    def usage(self) -> AnswerUsage:
        return AnswerUsage(self.input_tokens, self.cached_tokens, self.output_tokens)

    @property
    def wasted_tokens(self) -> int:
        """Tokens that a worker had computed by the end and nobody was sent."""
        return max(0, self._computed_tokens - self.output_tokens)

    @property
    def used_tokens(self) -> int:
        """Of prompt and outputs, what workers have computed for it; 0 before one took it."""
        return self.input_tokens + self.output_tokens + self.wasted_tokens if self.attempts else 0

    def encoding(self) -> None:
        """The conversation goes to the tokenizer."""
        self.timeline.enter(Phase.ENCODE)

    def encoded(self, input_tokens: int, duration_us: int) -> None:
        self.timeline.enter(Phase.ADMISSION, [(Phase.ENCODE, duration_us)])
        self.input_tokens = input_tokens

    def queued(self, position: int) -> None:
        """It stands in line with `position` others in front; the first time is remembered."""
        self.timeline.enter(Phase.QUEUE)
        if self.queue_position is None:
            self.queue_position = position

    def placed(self, worker_id: str, routing_note: str) -> None:
        self.timeline.enter(Phase.BATCH_WAIT)
        self.worker_id, self.routing_note = worker_id, routing_note
        self.attempts += 1
        self.account.attempt_begun()

    def generated(self, new: NewTokens) -> None:
        """The prompt is being computed, or ids came.

        Without the worker's word, the time before the first id is batch wait.
        """
        if not new.token_ids:
            if new.waited_us is not None and self.timeline.phase is Phase.BATCH_WAIT:
                self.timeline.enter(Phase.PREFILL, [(Phase.BATCH_WAIT, new.waited_us)])
            return
        self._computed_tokens += len(new.token_ids)
        if new.cached_tokens is not None:
            self.cached_tokens = new.cached_tokens
        if self.timeline.phase in _BEFORE_FIRST_TOKEN:
            self._end_prefill(Phase.DECODE, new.durations_us)
        else:
            self._decode_us += self.timeline.enter(Phase.DECODE)

    def finished(self, report: WorkerReport) -> None:
        """The worker's last entry: no further id comes from this attempt."""
        self.preemptions += report.preemptions
        if self.timeline.phase in _BEFORE_FIRST_TOKEN:
            self._end_prefill(Phase.DETOKENIZE, report.durations_us)
        elif self.timeline.phase is Phase.DECODE:
            self._decode_us += self.timeline.enter(Phase.DETOKENIZE)
            decode = [(Phase.DECODE, report.decode_us)]
            self.timeline.divide(Phase.DECODE, self._decode_us, decode)

    def _end_prefill(self, to: Phase, reported: Reported) -> None:
        """Of what is reported, a stretch that began with the prefill holds that alone."""
        if self.timeline.phase is Phase.PREFILL:
            reported = [(phase, us) for phase, us in reported if phase is Phase.PREFILL]
        self.timeline.enter(to, reported)

    def wasted(self, num_tokens: int) -> None:
        """So many more were computed for an attempt that had been given up."""
        if self.is_over:
            self.late_tokens += num_tokens
            self.on_late(self, num_tokens)
        else:
            self._computed_tokens += num_tokens

    def has_text_of(self, num_ids: int, choice: int) -> None:
        """The text of so many ids of a choice is on its way to the client."""
        self._put_out(choice, max(self._outputs.get(choice, 0), num_ids))

    def choice_ended(self, choice: int, stop_reason: StopReason, output_tokens: int) -> None:
        """A choice's text is complete; the first one's stop reason is the request's."""
        self._put_out(choice, output_tokens)
        if choice == 0:
            self.stop_reason = stop_reason

    def text_ended(self, duration_us: int) -> None:
        """All text is there; `duration_us` is what the tokenizer took for the last of it."""
        self.timeline.enter(Phase.DELIVERY, [(Phase.DETOKENIZE, duration_us)])

    def _put_out(self, choice: int, num_tokens: int) -> None:
        self._outputs[choice] = num_tokens
        self.output_tokens = sum(self._outputs.values())

    def first_delta(self) -> None:
        """Text is handed to the client; only the first counts."""
        if self.first_delta_us is None:
            self.first_delta_us = self.timeline.elapsed_us()

    def close(self, reason: Reason | None = None) -> None:
        """It is over. The first reason stays; one that comes after success replaces it."""
        if self.is_over and (self.reason is not None or reason is None):
            return
        self.is_over, self.reason = True, reason
        self.timeline.close()

    def fields(self) -> dict[str, object]:
        """The log line's fields; a phase that took no time is absent. Milliseconds."""
        total_us, phases = self.timeline.read()
        first = {} if self.first_delta_us is None else {"first_delta_ms": self.first_delta_us / 1e3}
        return {
            "request_id": self.request_id,
            "trace_id": self.trace.trace_id,
            "method": self.method,
            "outcome": "SERVED" if self.reason is None else self.reason.value,
            "tenant": self.tenant,
            "model": self.model,
            "worker_id": self.worker_id,
            "attempts": self.attempts,
            "preemptions": self.preemptions,
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "wasted_tokens": self.wasted_tokens,
            **{f"{phase.name.lower()}_ms": us / 1e3 for phase, us in phases},
            **first,
            "total_ms": total_us / 1e3,
        }
