"""One session with one worker: what it says of itself, its load, and what it was given.

Load is pushed by the worker and corrected by what was submitted after the number that a
report includes. Every attempt stays in `WorkerState.attempts` until its terminal entry or
the end of the session, also when its request is long gone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from noria.service.limits import MAX_PRIORITY, MIN_PRIORITY
from router.breaker import Breaker
from router.requests import Generation
from router.step_pace import STALL_MIN_S, StepPace
from router.token_stream import TokenStream
from router.worker_news import NO_WORK, Finish, NewTokens, Refusal, Work, WorkerReport


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """What a worker says of itself when a session begins. Sizes are in tokens and blocks.

    `yields_places`: what lower priorities hold there is in no higher one's way.
    """

    instance_id: str
    model: str
    aliases: tuple[str, ...]
    vocab_fingerprint: str
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    default_max_tokens: int
    yields_places: bool = False

    @property
    def look_ahead(self) -> int:
        """Sequences that may wait at the worker, so that a freed place never idles a step."""
        return max(1, self.max_num_seqs // 16)

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that hold this many tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class PriorityLoad:
    """What a worker holds of one priority.

    `yielded_blocks` would be free besides if all that run at it and below gave way.
    """

    priority: int
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    yielded_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Ahead:
    """What precedes a request of some priority, and the blocks that it can count on."""

    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker held at `received_at` (router's clock).

    `priorities` has the same by priority, if the worker yields places; `preparing` wait for a
    grammar.
    """

    received_at: float
    last_submit_number: int
    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    draining: bool
    step_count: int = 0
    step_age_s: float = 0.0
    preparing: int = 0
    priorities: tuple[PriorityLoad, ...] = ()
    cached_blocks: int = 0
    tokens_per_second: float = 0.0

    def ahead_of(self, priority: int | None) -> Ahead:
        """What a request of this priority finds in its way; None: all that there is."""
        if priority is None:
            return Ahead(self.running, self.waiting, self.waiting_tokens, self.free_blocks)
        ahead = [level for level in self.priorities if level.priority >= priority]
        lower = [level.yielded_blocks for level in self.priorities if level.priority < priority]
        return Ahead(
            running=sum(level.running for level in ahead),
            waiting=sum(level.waiting for level in ahead),
            waiting_tokens=sum(level.waiting_tokens for level in ahead),
            free_blocks=self.free_blocks + max(lower, default=0),
        )


LOAD_TTL_S = 2.0
# Named by a refusal that concerns nobody but those that bring a grammar.
GRAMMAR_FIELD = "sampling.structured_output"


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """When a load report is out of date, and from what age on a step is a stall at all."""

    load_ttl_s: float = LOAD_TTL_S
    stall_min_s: float = STALL_MIN_S


class WorkerLine(Protocol):
    """Carries submits and aborts to a worker, in order, without blocking."""

    def submit(self, generation: Generation, attempt: int, submit_number: int) -> None: ...

    def abort(self, submit_number: int) -> None: ...

    def abort_choice(self, submit_number: int, choice: int) -> None: ...

    def set_draining(self, draining: bool) -> None: ...


@dataclass(slots=True)
class Attempt:
    """What was submitted under one number; `wanted` until its request gives it up."""

    stream: TokenStream
    prompt_tokens: int
    price: int
    num_choices: int = 1
    priority: int = 0
    wanted: bool = True
    delivered: int = 0


@dataclass(frozen=True, slots=True)
class _Refused:
    """Up to which priority, and whether only those that bring a grammar."""

    priority: int
    of_grammars: bool


class WorkerState:
    """One session with one worker. `worker_id` is the worker's address."""

    def __init__(
        self,
        worker_id: str,
        figures: WorkerFigures,
        line: WorkerLine,
        limits: SilenceLimits = SilenceLimits(),
    ) -> None:
        self.worker_id = worker_id
        self.figures = figures
        self.load: LoadReport | None = None
        self.attempts: dict[int, Attempt] = {}
        # A refusal shows that the last report is out of date: who would be refused like it
        # waits for the next one.
        self._refused: list[_Refused] = []
        self.tokens_in_flight = 0
        # Of this session: whoever comes back after a break is not judged by what was before.
        self.breaker = Breaker()
        self._line = line
        self._limits = limits
        self._pace = StepPace(limits.stall_min_s)
        self._submit_number = 0
        self._submitted_at = 0.0

    def submit(self, stream: TokenStream, now: float, routing_note: str = "") -> None:
        """Give the worker a request."""
        if not self.attempts:
            self._pace.begin(now)
        generation = stream.generation
        self._submit_number += 1
        self._submitted_at = now
        stream.attempts += 1
        prompt_tokens = len(generation.prompt_token_ids)
        attempt = Attempt(
            stream,
            prompt_tokens,
            generation.price,
            generation.num_choices,
            generation.priority,
        )
        self.attempts[self._submit_number] = attempt
        self.tokens_in_flight += attempt.price
        self.breaker.placed(self._submit_number, now)
        self._line.submit(generation, stream.attempts, self._submit_number)
        stream.place(self, self._submit_number, routing_note)

    def abort(self, submit_number: int) -> None:
        """Nobody wants this attempt any more; it counts until the worker's last entry."""
        attempt = self.attempts.get(submit_number)
        if attempt is not None and attempt.wanted:
            attempt.wanted = False
            self._line.abort(submit_number)

    def abort_choice(self, submit_number: int, choice: int) -> None:
        """Nobody wants more of this choice; the attempt goes on."""
        attempt = self.attempts.get(submit_number)
        if attempt is not None and attempt.wanted:
            self._line.abort_choice(submit_number, choice)

    def set_draining(self, draining: bool) -> None:
        """Ask it to take nothing new, or to take requests again; its load says when it does."""
        self._line.set_draining(draining)

    def give_up_unstarted(self) -> int:
        """Let requests without a first token be placed elsewhere; how many there were."""
        unstarted = [
            attempt.stream
            for attempt in self.attempts.values()
            if attempt.wanted and not attempt.stream.has_begun
        ]
        for stream in unstarted:
            stream.leave()
        return len(unstarted)

    def report(self, load: LoadReport) -> None:
        self.load = load
        self._refused.clear()
        is_busy = load.running > 0 or load.waiting > 0
        if load.preparing and not is_busy:
            # No step is due before a grammar is there.
            self._pace.begin(load.received_at)
        self._pace.report(load.received_at, load.step_count, load.step_age_s, is_busy=is_busy)

    @property
    def is_draining(self) -> bool:
        """Whether it said last that it takes nothing new."""
        return self.load is not None and self.load.draining

    @property
    def usual_step_s(self) -> float | None:
        """The median of its recent steps in seconds; None before the first."""
        return self._pace.usual_s

    def known_load(self, now: float) -> LoadReport | None:
        """The last report, unless it is out of date: that means unknown, not zero."""
        load = self.load
        return load if load and now - load.received_at <= self._limits.load_ttl_s else None

    def step_age_s(self, now: float) -> float:
        """For how long no step has ended although there is work."""
        return self._pace.step_age_s(now, holds_work=bool(self.attempts))

    def is_stalled(self, now: float) -> bool:
        return self.step_age_s(now) > self._pace.stall_after_s

    def deliver(self, submit_number: int, new: NewTokens) -> None:
        """Hand new ids to the request they belong to; those of an aborted one are dropped."""
        attempt = self.attempts.get(submit_number)
        if attempt is not None and attempt.wanted:
            attempt.delivered += len(new.token_ids)
            attempt.stream.deliver(new)

    def finish(self, submit_number: int, finishes: Sequence[Finish], report: WorkerReport) -> None:
        attempt = self._end(submit_number)
        if attempt is None:
            return
        attempt.stream.count(report.work)
        if {Finish.ABORTED, Finish.EXPIRED}.isdisjoint(finishes):
            self.breaker.served(submit_number)
        else:
            self.breaker.passed(submit_number)
        if attempt.wanted:
            attempt.stream.finish(finishes, report)
        else:
            attempt.stream.waste(report.output_tokens - attempt.delivered)

    def refuse(
        self,
        submit_number: int,
        refusal: Refusal,
        message: str,
        field: str,
        work: Work = NO_WORK,
    ) -> None:
        attempt = self._end(submit_number)
        if refusal in (Refusal.FULL, Refusal.DRAINING):
            full = refusal is Refusal.FULL and self.figures.yields_places and attempt is not None
            priority = attempt.priority if full and attempt else MAX_PRIORITY
            self._refused.append(_Refused(priority, of_grammars=field == GRAMMAR_FIELD))
        if refusal is Refusal.INTERNAL and attempt is not None:
            # The message that told of it may have told its load, too.
            told_at = self.load.received_at if self.load else self._submitted_at
            self.breaker.failed(submit_number, told_at)
        else:
            self.breaker.passed(submit_number)
        if attempt is None:
            return
        attempt.stream.count(work)
        if attempt.wanted:
            attempt.stream.refuse(refusal, message, field)

    def close(self) -> None:
        """The session is over and every attempt with it."""
        lost, self.attempts = self.attempts, {}
        self.tokens_in_flight = 0
        for attempt in lost.values():
            attempt.stream.count_lost(attempt.delivered)
            if attempt.wanted:
                attempt.stream.lose()

    def ahead_of(self, priority: int) -> Ahead | None:
        """What a request of this priority finds in its way, as last reported."""
        if self.load is None:
            return None
        return self.load.ahead_of(priority if self.figures.yields_places else None)

    def refuses(self, priority: int, *, has_grammar: bool) -> bool:
        """Whether it has refused such a request since the last report."""
        return any(
            priority <= refused.priority and (has_grammar or not refused.of_grammars)
            for refused in self._refused
        )

    def submitted_since_load(self, priority: int = MIN_PRIORITY) -> Iterator[Attempt]:
        """Attempts in the way of this priority that the last report does not include."""
        included = self.load.last_submit_number if self.load else 0
        for number in reversed(self.attempts):
            if number <= included:
                return
            if self.attempts[number].priority >= priority or not self.figures.yields_places:
                yield self.attempts[number]

    def _end(self, submit_number: int) -> Attempt | None:
        attempt = self.attempts.pop(submit_number, None)
        if attempt is not None:
            self.tokens_in_flight -= attempt.price
        return attempt
