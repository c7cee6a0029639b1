"""Sessions with routers: which sequence belongs to whom, and what goes back to each.

One message per engine step and router carries everything of that step; for a router that
reads slowly, steps merge. When a session ends, however it ends, all of it is aborted.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Protocol

from noria.service.outbox import Outbox
from noria.v1 import worker_pb2
from worker.engine import Account, Ended, EngineLoad, EngineOutput
from worker.sampling_checks import InvalidSubmitError, ModelLimits
from worker.scheduler import SequenceUpdate
from worker.sequence import Sequence
from worker.submission import Submission
from worker.translate import (
    FINISH_REASONS,
    FINISHED_BY_ITSELF,
    StepFacts,
    chosen_token,
    durations_us,
    sequence_from,
    step_record,
)


class EngineInbox(Protocol):
    """The engine's thread, as sessions see it."""

    @property
    def load(self) -> EngineLoad: ...
    def step_age_s(self) -> float: ...
    def submit(self, sequence: Sequence) -> None: ...
    def abort(self, sequence_id: int) -> None: ...


@dataclass(slots=True)
class StepMessage:
    """What waits for one router: deltas by (submit number, choice), and terminal entries."""

    step_number: int = 0
    deltas: dict[tuple[int, int], worker_pb2.Delta] = field(default_factory=dict)
    terminals: list[worker_pb2.Terminal] = field(default_factory=list)
    load: worker_pb2.Load = field(default_factory=worker_pb2.Load)

    def add_delta(self, delta: worker_pb2.Delta) -> None:
        key = (delta.submit_number, delta.choice)
        if key in self.deltas:
            self.deltas[key].MergeFrom(delta)
        else:
            self.deltas[key] = delta

    def to_proto(self) -> worker_pb2.SessionResponse:
        if not self.deltas and not self.terminals:
            return worker_pb2.SessionResponse(load=self.load)
        step = worker_pb2.Step(
            step_number=self.step_number,
            deltas=self.deltas.values(),
            terminals=self.terminals,
            load=self.load,
        )
        return worker_pb2.SessionResponse(step=step)


def merge_steps(last: StepMessage, new: StepMessage) -> bool:
    """Fold `new` into `last`; a delta of a submit never comes after its terminal entry."""
    last.step_number = max(last.step_number, new.step_number)
    for delta in new.deltas.values():
        last.add_delta(delta)
    last.terminals.extend(new.terminals)
    last.load = new.load
    return True


class SessionProtocolError(Exception):
    """The router broke the session's rules: entries could no longer be told apart."""


class Session:
    """One router's submits. Call it on the event loop only."""

    def __init__(self, hub: "SessionHub") -> None:
        self._hub = hub
        self.outbox: Outbox[StepMessage] = Outbox(merge_steps)
        self._live: dict[int, Submission] = {}
        self._names: set[str] = set()
        self._last_submit_number = 0
        self._unseen: deque[tuple[int, int]] = deque()
        self._seen_submit_number = 0

    @property
    def num_live(self) -> int:
        return len(self._live)

    def submit(self, submit: worker_pb2.Submit) -> None:
        """Take a submit, or answer with its terminal entry. Raises SessionProtocolError."""
        number = submit.submit_number
        if number <= self._last_submit_number:
            raise SessionProtocolError(
                f"submit_number {number} does not follow {self._last_submit_number}"
            )
        self._last_submit_number = number
        refusal = self._refusal(submit)
        if refusal is not None:
            self._refuse(number, refusal)
            return
        try:
            first = self._hub.new_sequence(submit)
        except InvalidSubmitError as error:
            code = worker_pb2.REFUSAL_CODE_INVALID
            self._refuse(
                number, worker_pb2.Refused(code=code, message=str(error), field=error.field)
            )
            return
        self._live[number] = submission = Submission(number, submit.id, first)
        self._names.add(submit.id)
        self._unseen.append((first.sequence_id, number))
        self._hub.start(submission, self)

    def abort(self, submit_number: int) -> None:
        """End a submit; an unknown number is ignored."""
        if submit_number in self._live:
            self._hub.abort(self._live[submit_number])

    def abort_all(self) -> None:
        """End everything of this session and forget it: nobody is left to tell."""
        for submission in self._live.values():
            self._hub.abort(submission)
            self._hub.forget(submission)
        self._live.clear()
        self._names.clear()

    def end(self, submission: Submission) -> None:
        """Forget a submit whose terminal entry is on its way."""
        del self._live[submission.number]
        self._names.discard(submission.name)

    def report_load(self) -> None:
        """Put the current load on its way, beside whatever waits already."""
        self.outbox.put(StepMessage(load=self.load()))

    def load(self) -> worker_pb2.Load:
        """The engine's load with the last submit of this session that it includes."""
        load = self._hub.engine.load
        while self._unseen and self._unseen[0][0] <= load.last_sequence_id:
            self._seen_submit_number = self._unseen.popleft()[1]
        return worker_pb2.Load(
            last_submit_number=self._seen_submit_number,
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            free_blocks=load.free_blocks,
            cached_blocks=load.cached_blocks,
            step_count=load.step_count,
            step_age_ms=round(self._hub.engine.step_age_s() * 1000),
            tokens_per_second=load.tokens_per_second,
            draining=self._hub.draining,
        )

    def _refusal(self, submit: worker_pb2.Submit) -> worker_pb2.Refused | None:
        code = worker_pb2.REFUSAL_CODE_INVALID
        if submit.id in self._names:
            return worker_pb2.Refused(
                code=code, message="id: already used by a running submit", field="id"
            )
        if self._hub.draining:
            return worker_pb2.Refused(code=worker_pb2.REFUSAL_CODE_DRAINING, message="draining")
        return None

    def _refuse(self, number: int, refused: worker_pb2.Refused) -> None:
        terminal = worker_pb2.Terminal(submit_number=number, refused=refused)
        self.outbox.put(StepMessage(terminals=[terminal], load=self.load()))


class SessionHub:
    """All sessions of a worker, and the way from a sequence back to its session."""

    def __init__(
        self,
        engine: EngineInbox,
        limits: ModelLimits,
        hidden_size: int,
        *,
        pieces: Ids[bytes] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pieces`: the bytes of each token id, for the records of traced steps."""
        self.engine = engine
        self.draining = False
        self._limits = limits
        self._hidden_size = hidden_size
        self._pieces = pieces
        self._clock = clock
        self._sessions: set[Session] = set()
        self._routes: dict[int, tuple[Session, Submission]] = {}
        self._next_sequence_id = 1

    @property
    def num_live(self) -> int:
        """Submits without a terminal entry, all sessions together."""
        return sum(session.num_live for session in self._sessions)

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        """A session; on exit everything of it is aborted."""
        session = Session(self)
        self._sessions.add(session)
        try:
            yield session
        finally:
            self._sessions.discard(session)
            session.abort_all()
            session.outbox.close()

    def new_sequence(self, submit: worker_pb2.Submit) -> Sequence:
        """Raises InvalidSubmitError."""
        first = sequence_from(submit, self._limits, self._next_sequence_id, self._clock())
        self._next_sequence_id += 1 + len(first.siblings)
        return first

    def start(self, submission: Submission, session: Session) -> None:
        """Hand a submit's sequences to the engine; their outcome goes to `session`."""
        for sequence_id in submission.sequence_ids():
            self._routes[sequence_id] = (session, submission)
        self.engine.submit(submission.first)

    def abort(self, submission: Submission) -> None:
        """End all choices of a submit; those that have ended are passed over."""
        for sequence_id in submission.sequence_ids():
            self.engine.abort(sequence_id)

    def forget(self, submission: Submission) -> None:
        """Whatever still comes from this submit goes nowhere."""
        for sequence_id in submission.sequence_ids():
            self._routes.pop(sequence_id, None)

    def deliver(self, output: EngineOutput) -> None:
        """Sort one engine output by session: one message for each that it concerns."""
        messages: dict[Session, StepMessage] = {}
        step = self._step_facts(output)
        for sequence_id, account in output.entered.items():
            self._deliver_entered(sequence_id, account, messages)
        for update in output.updates:
            begun = output.begun.get(update.sequence.sequence_id)
            self._deliver_update(update, step, begun, messages)
        for ended in output.ended:
            self._deliver_end(ended, messages)
        for refusal in output.refused:
            if refusal.sequence_id in self._routes:
                _, submission = self._routes[refusal.sequence_id]
                self._deliver_terminal(submission, submission.refused(refusal), messages)
        for session, message in messages.items():
            message.step_number, message.load = step.number, session.load()
            session.outbox.put(message)

    def report_loads(self) -> None:
        """Tell every router the current load, also while a step runs."""
        for session in self._sessions:
            session.report_load()

    def _deliver_entered(
        self, sequence_id: int, account: Account, messages: dict[Session, StepMessage]
    ) -> None:
        """The first choice computes its prompt from now on, whatever becomes of it."""
        route = self._routes.get(sequence_id)
        if route is not None and route[1].first.sequence_id == sequence_id:
            session, submission = route
            waiting_us, _, _ = durations_us(account)
            delta = worker_pb2.Delta(submit_number=submission.number, waiting_us=waiting_us)
            messages.setdefault(session, StepMessage()).add_delta(delta)

    def _deliver_update(
        self,
        update: SequenceUpdate,
        step: StepFacts,
        begun: Account | None,
        messages: dict[Session, StepMessage],
    ) -> None:
        route = self._routes.get(update.sequence.sequence_id)
        if route is None or not (update.token or update.sequence.trace_steps):
            return
        session, submission = route
        choice = update.sequence.choice
        delta = worker_pb2.Delta(submit_number=submission.number, choice=choice)
        if update.token is not None:
            delta.token_ids.append(update.token.token_id)
            if update.sequence.sampling.logprobs is not None:
                delta.chosen.append(chosen_token(update.token))
            if update.is_first_token and choice == 0:
                delta.cached_tokens = update.sequence.num_cached_tokens
        if begun is not None:
            delta.waiting_us, delta.prefill_us, _ = durations_us(begun)
        if update.sequence.trace_steps:
            delta.steps.append(step_record(update, step, self._pieces))
        messages.setdefault(session, StepMessage()).add_delta(delta)

    def _deliver_end(self, ended: Ended, messages: dict[Session, StepMessage]) -> None:
        """The end of a choice: said on its last delta, or by the terminal entry of all."""
        route = self._routes.get(ended.sequence.sequence_id)
        if route is None:
            return
        session, submission = route
        submission.ended.append(ended)
        if submission.is_over:
            self._deliver_terminal(submission, submission.terminal(), messages)
        elif ended.failure:
            self.abort(submission)
        elif ended.sequence.finish_reason in FINISHED_BY_ITSELF:
            delta = worker_pb2.Delta(
                submit_number=submission.number,
                choice=ended.sequence.choice,
                finish_reason=FINISH_REASONS[ended.sequence.finish_reason],
            )
            messages.setdefault(session, StepMessage()).add_delta(delta)

    def _deliver_terminal(
        self,
        submission: Submission,
        terminal: worker_pb2.Terminal,
        messages: dict[Session, StepMessage],
    ) -> None:
        session, _ = self._routes[submission.first.sequence_id]
        self.forget(submission)
        session.end(submission)
        messages.setdefault(session, StepMessage()).terminals.append(terminal)

    def _step_facts(self, output: EngineOutput) -> StepFacts:
        batch = output.output
        return StepFacts(
            number=output.load.step_count,
            batch_size=len(batch.scheduled) if batch else 0,
            num_positions=batch.num_tokens if batch else 0,
            duration_us=round(output.step_s * 1e6),
            hidden_size=self._hidden_size,
        )
