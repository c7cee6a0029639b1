"""Sessions with routers: which sequence belongs to whom, and what goes back to each.

One message per engine step and router carries everything of that step; for a router that
reads slowly, steps merge. When a session ends, however it ends, all of it is aborted.
"""

from collections import deque
from typing import Protocol

from noria.service.outbox import Outbox
from noria.v1 import worker_pb2
from worker.accounting import NOTHING, Accounts
from worker.engine_output import EngineLoad
from worker.levels import Level
from worker.sampling_checks import InvalidSubmitError
from worker.sequence import Sequence
from worker.step_message import StepMessage, merge_steps
from worker.submission import Submission


class Hub(Protocol):
    """The worker behind its sessions."""

    @property
    def draining(self) -> bool: ...
    def set_draining(self, draining: bool) -> None: ...

    accounts: Accounts

    def new_sequence(self, submit: worker_pb2.Submit) -> Sequence: ...
    def start(self, submission: Submission, session: "Session") -> None: ...
    def abort(self, submission: Submission) -> None: ...
    def abort_choice(self, submission: Submission, choice: int) -> None: ...
    def forget(self, submission: Submission) -> None: ...
    def load(self) -> EngineLoad: ...
    def step_age_s(self) -> float: ...


class SessionProtocolError(Exception):
    """The router broke the session's rules: entries could no longer be told apart."""


class Session:
    """One router's submits. Call it on the event loop only."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.outbox: Outbox[StepMessage] = Outbox(merge_steps)
        self._live: dict[int, Submission] = {}
        self._names: set[str] = set()
        self._last_submit_number = 0
        self._unseen: deque[tuple[int, int]] = deque()
        self._seen_submit_number = 0
        self._untold = NOTHING

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

    def abort_choice(self, submit_number: int, choice: int) -> None:
        """End one choice of a submit; unknown numbers are ignored, as is one that has ended."""
        if submit_number in self._live:
            self._hub.abort_choice(self._live[submit_number], choice)

    def set_draining(self, draining: bool) -> None:
        """Take nothing new from any router, or take requests again."""
        self._hub.set_draining(draining)

    def abort_all(self) -> None:
        """End everything of this session and forget it: nobody is left to tell."""
        accounts = self._hub.accounts
        accounts.lost += self._untold
        self._untold = NOTHING
        for submission in self._live.values():
            accounts.lost += submission.work
            self._hub.abort(submission)
            self._hub.forget(submission)
        self._live.clear()
        self._names.clear()

    def end(self, submission: Submission) -> None:
        """Forget a submit whose terminal entry is on its way."""
        del self._live[submission.number]
        self._names.discard(submission.name)
        self._untold += submission.work

    def sent(self, message: StepMessage) -> None:
        """The router has been sent this message: what it tells of is lost no more."""
        self._untold -= message.work
        self._hub.accounts.told += message.work

    def report_load(self) -> None:
        """Put the current load on its way, beside whatever waits already."""
        self.outbox.put(StepMessage(load=self.load()))

    def load(self) -> worker_pb2.Load:
        """The engine's load with the last submit of this session that it includes."""
        load = self._hub.load()
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
            step_age_ms=round(self._hub.step_age_s() * 1000),
            tokens_per_second=load.tokens_per_second,
            draining=self._hub.draining,
            preparing=load.preparing,
            priorities=map(_priority_load, load.levels),
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


def _priority_load(level: Level) -> worker_pb2.PriorityLoad:
    return worker_pb2.PriorityLoad(
        priority=level.priority,
        running=level.running,
        waiting=level.waiting,
        waiting_tokens=level.waiting_tokens,
        yielded_blocks=level.yielded_blocks,
    )
