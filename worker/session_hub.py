"""All sessions of a worker, and the way from a sequence back to its session."""

import contextlib
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from typing import Protocol

from noria.v1 import worker_pb2
from worker.accounting import Accounts, work_of
from worker.engine_output import Account, Ended, EngineLoad, EngineOutput
from worker.sampling_checks import ModelLimits
from worker.scheduled import SequenceUpdate
from worker.sequence import Sequence
from worker.session import Session
from worker.step_message import StepMessage
from worker.submission import Submission
from worker.translate import (
    FINISH_REASONS,
    FINISHED_BY_ITSELF,
    Origin,
    StepFacts,
    chosen_token,
    durations_us,
    prompt_logprobs,
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


class SessionHub:
    """All sessions of a worker, and the way from a sequence back to its session."""

    def __init__(
        self,
        engine: EngineInbox,
        limits: ModelLimits,
        origin: Origin,
        *,
        pieces: Ids[bytes] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pieces`: the bytes of each token id, for the records of traced steps."""
        self.engine = engine
        # The first is for good; the second is taken back by any router.
        self.stopping = self.drained = False
        self.accounts = Accounts()
        self._limits = limits
        self._origin = origin
        self._pieces = pieces
        self._clock = clock
        self._sessions: set[Session] = set()
        self._routes: dict[int, tuple[Session, Submission]] = {}
        self._next_sequence_id = 1

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return self.stopping or self.drained

    def set_draining(self, draining: bool) -> None:
        """Take nothing new, or take requests again; every router hears of it at once."""
        self.drained = draining
        self.report_loads()

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

    def load(self) -> EngineLoad:
        """The engine's last published load."""
        return self.engine.load

    def step_age_s(self) -> float:
        """For how long the step now running has been running."""
        return self.engine.step_age_s()

    def start(self, submission: Submission, session: Session) -> None:
        """Hand a submit's sequences to the engine; their outcome goes to `session`."""
        for sequence_id in submission.sequence_ids():
            self._routes[sequence_id] = (session, submission)
        self.engine.submit(submission.first)

    def abort(self, submission: Submission) -> None:
        """End all choices of a submit; those that have ended are passed over."""
        for sequence_id in submission.sequence_ids():
            self.engine.abort(sequence_id)

    def abort_choice(self, submission: Submission, choice: int) -> None:
        """End one choice of a submit, if it has that one; the others go on."""
        sequence_ids = list(submission.sequence_ids())
        if choice < len(sequence_ids):
            self.engine.abort(sequence_ids[choice])

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
        scores = update.prompt_logprobs
        if route is None or not (update.token or scores or update.sequence.trace_steps):
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
        if scores is not None:
            delta.prompt_logprobs.CopyFrom(prompt_logprobs(scores))
        if begun is not None:
            delta.waiting_us, delta.prefill_us, _ = durations_us(begun)
        if update.sequence.trace_steps:
            delta.steps.append(step_record(update, step, self._pieces))
        messages.setdefault(session, StepMessage()).add_delta(delta)

    def _deliver_end(self, ended: Ended, messages: dict[Session, StepMessage]) -> None:
        """The end of a choice: said on its last delta, or by the terminal entry of all."""
        route = self._routes.get(ended.sequence.sequence_id)
        if route is None:
            self.accounts.lost += work_of([ended])
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
        messages.setdefault(session, StepMessage()).add_terminal(terminal, submission.work)

    def _step_facts(self, output: EngineOutput) -> StepFacts:
        batch = output.output
        return StepFacts(
            number=batch.step if batch else output.load.step_count,
            batch_size=len(batch.scheduled) if batch else 0,
            num_positions=batch.num_tokens if batch else 0,
            duration_us=round(output.step_s * 1e6),
            origin=self._origin,
        )
