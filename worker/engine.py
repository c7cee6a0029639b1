"""The engine: schedule, compute, book; one step after another.

Synchronous: it owns scheduler and runner and is called from a single thread
(`engine_thread`). Endings and refusals are gathered and leave with the next output, so
that one step gives one message.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from time import monotonic

from worker.device_time import elapsed_us, shares_us
from worker.engine_output import Account, Ended, EngineLoad, EngineOutput, Refusal, TokenRate
from worker.flights import Flights, Landed, Runner
from worker.grammar.compiler import TooManyGrammarsError
from worker.grammar.line import NO_COMPILER, Compiler, GrammarLine
from worker.grammar.source import GrammarError
from worker.scheduled import SequenceUpdate
from worker.scheduler import Scheduler
from worker.scores import unanswered
from worker.sequence import (
    FinishReason,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
)


class Engine:
    """Scheduler, runner and the accounts of live sequences. Call it from one thread.

    `look_ahead` sequences of one priority may wait so that a freed place never idles a step;
    beyond that a sequence that does not fit now is refused, and queues where it can go
    elsewhere. Whoever waits for a grammar keeps no place from anybody, and takes the first
    one that there is once it has it.
    `steps_ahead` steps stay in flight while the next is launched: at 1 the device computes
    while the step before is booked, and a sequence that ends by its token has been scheduled
    once more by then; that is computed for nobody.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        look_ahead: int,
        steps_ahead: int = 0,
        compiler: Compiler = NO_COMPILER,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.scheduler = scheduler
        self._grammars = GrammarLine(compiler)
        self._flights = Flights(runner, clock, ahead=steps_ahead)
        self._look_ahead = look_ahead
        self._clock = clock
        self._accounts: dict[int, Account] = {}
        self._last_sequence_id = 0
        self._busy_us = 0
        self._rate = TokenRate()
        self._pending = EngineOutput()

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now: those that wait for a grammar need none."""
        return len(self._accounts) > len(self._grammars) or len(self._flights) > 0

    def patience_s(self) -> float | None:
        """After how long without work or news a step is due all the same; None: never."""
        deadline = self._grammars.next_deadline
        return None if deadline is None else max(0.0, deadline - self._clock())

    def submit(self, sequence: Sequence, arrived: float) -> None:
        """Take a sequence and its siblings, or note what becomes of them for the next output.

        A refusal is that of all. Choices that are over already end without a step.
        """
        self._last_sequence_id = max(self._last_sequence_id, sequence.sequence_id)
        choices = [sequence, *sequence.siblings]
        for choice in choices:
            choice.finish_reason = self.scheduler.reason_to_end(choice)
        unfinished = [choice for choice in choices if choice.finish_reason is None]
        refusal = self._add(unfinished)
        if refusal is not None:
            self._pending.refused.append(refusal)
            return
        for choice in choices:
            self._accounts[choice.sequence_id] = Account(arrived)
            if choice.finish_reason is not None:
                self._end(choice)

    def _add(self, choices: list[Sequence]) -> Refusal | None:
        """Let unfinished choices of one request wait, all or none."""
        if not choices:
            return None
        first, *others = choices
        if not self._has_room(choices):
            return Refusal(first.sequence_id, True, "no free place and no free KV blocks")
        grammar = first.sampling.grammar
        try:
            if grammar is None:
                self.scheduler.add(first, others)
            else:
                self.scheduler.check_fits(first)
                self._grammars.add(grammar, choices)
        except TooManyGrammarsError as error:
            return Refusal(first.sequence_id, True, str(error), "sampling.structured_output")
        except GrammarError as error:
            return _refused(first, "sampling.structured_output", str(error))
        except ValueError as error:
            return Refusal(first.sequence_id, False, str(error))
        return None

    def _has_room(self, choices: Ids[Sequence]) -> bool:
        """Whether choices of one request may wait for places."""
        first, *others = choices
        ahead = self.scheduler.num_waiting_ahead(first.priority)
        return ahead < self._look_ahead or self.scheduler.fits_now(first, others)

    def _take_prepared(self) -> None:
        """Whoever has its grammar waits for a place from now on, as far as there is room."""
        for prepared in self._grammars.take_prepared(self._has_room):
            first, *others = prepared.choices
            if prepared.failure:
                self._give_up(prepared.choices, prepared.failure)
                continue
            if not prepared.problem:
                self.scheduler.add(first, others)
                continue
            for choice in prepared.choices:
                del self._accounts[choice.sequence_id]
            self._pending.refused.append(_refused(first, prepared.field, prepared.problem))

    def _give_up(self, choices: Iterable[Sequence], failure: str) -> None:
        """End sequences that never came to run by a fault of the worker's."""
        for choice in choices:
            choice.status, choice.finish_reason = SequenceStatus.FINISHED, FinishReason.ABORTED
            self._end(choice, failure)

    def abort(self, sequence_id: int) -> None:
        """End a sequence at once. One that is not live (any more) is ignored."""
        aborted = FinishReason.ABORTED
        sequence = self.scheduler.finish(sequence_id, aborted)
        sequence = sequence or self._grammars.finish(sequence_id, aborted)
        if sequence is not None:
            self._end(sequence)

    def step(
        self,
        intake: Callable[[], None] = lambda: None,
        on_entered: Callable[[EngineOutput], None] = lambda output: None,
    ) -> EngineOutput:
        """Drop what is late, launch a batch, book the one that lands. Never raises for a batch.

        Before the batch is launched, `on_entered` hears of sequences that are in one for the
        first time.

        `intake` is called once a batch has landed, and may submit and abort: aborts that
        arrived meanwhile take effect before the batch is booked, so that nothing of it is
        held for them when this returns. Raises DeviceLostError.
        """
        now = self._clock()
        for sequence in [*self.scheduler.expire(now), *self._grammars.expire(now)]:
            self._end(sequence)
        self._take_prepared()
        launched = self._launch(on_entered)
        if self._flights and (self._flights.is_full or not launched):
            self._land(intake)
        else:
            intake()
        if not self._accounts:
            self.scheduler.check_integrity()
        return self._take_output()

    def _launch(self, on_entered: Callable[[EngineOutput], None]) -> bool:
        """Launch the next step, if there is one that depends on nothing in flight."""
        output = None if self._flights.has_failed else self.scheduler.schedule()
        if output is None:
            return False
        if entered := self._enter(output, self._clock()):
            on_entered(EngineOutput(entered=entered, load=self.load()))
        self._flights.launch(output)
        for scheduled in output.scheduled:
            self._accounts[scheduled.sequence_id].computed_tokens += scheduled.num_tokens
        return True

    def _enter(self, output: SchedulerOutput, now: float) -> dict[int, Account]:
        """Accounts of those whose first step this is."""
        accounts = {s.sequence_id: self._accounts[s.sequence_id] for s in output.scheduled}
        entered = {i: account for i, account in accounts.items() if account.first_step is None}
        for account in entered.values():
            account.first_step = now
        return entered

    def _land(self, intake: Callable[[], None]) -> None:
        landed = self._flights.land()
        self._charge(landed)
        intake()
        output = landed.output
        if landed.failure is not None:
            self.scheduler.give_up(output)
            self._fail(output.scheduled, "the batch failed")
            self._pending.failure = landed.failure
            return
        for entry, problem, field in unanswered(output, landed.result):
            self._fail([entry], problem, field)
        updates = self.scheduler.update(output, landed.result)
        self._rate.add(self._clock(), sum(update.token is not None for update in updates))
        self._pending.output, self._pending.step_s = output, landed.step_s
        self._pending.updates = updates
        self._book(updates)
        # What this step has freed is theirs before anybody new is told of it.
        self._take_prepared()

    def _charge(self, landed: Landed) -> None:
        """Divide a step's time among its sequences by positions computed.

        Those that have ended since it was launched have had their account closed: what was
        computed for them falls to the others, and nobody was busy if there are none.
        """
        accounts = self._accounts
        open_ = [s for s in landed.output.scheduled if s.sequence_id in accounts]
        if not open_:
            return
        step_us = elapsed_us(landed.began, landed.ended)
        self._busy_us += step_us
        shares = shares_us(step_us, [entry.num_tokens for entry in open_])
        for entry, share_us in zip(open_, shares, strict=True):
            accounts[entry.sequence_id].device_us += share_us

    def _book(self, updates: list[SequenceUpdate]) -> None:
        now = self._clock()
        for update in updates:
            account = self._accounts[update.sequence.sequence_id]
            if update.token is not None and account.first_token is None:
                account.first_token = now
                self._pending.begun[update.sequence.sequence_id] = account
            if update.sequence.finish_reason is not None:
                self._end(update.sequence)

    def _fail(self, entries: Iterable[ScheduledSequence], failure: str, field: str = "") -> None:
        """A failure takes its own sequences with it, and nobody else's."""
        for entry in entries:
            sequence = self.scheduler.fail(entry.sequence_id)
            if sequence is not None:
                self._end(sequence, failure, field)

    def _end(self, sequence: Sequence, failure: str = "", field: str = "") -> None:
        if sequence.matcher is not None:
            sequence.matcher.close()
        account = self._accounts.pop(sequence.sequence_id)
        account.ended = self._clock()
        self._pending.ended.append(Ended(sequence, account, failure, field))

    def _take_output(self) -> EngineOutput:
        taken, self._pending = self._pending, EngineOutput()
        taken.load = self.load()
        return taken

    def load(self) -> EngineLoad:
        """What the engine holds now."""
        scheduler = self.scheduler
        return EngineLoad(
            last_sequence_id=self._last_sequence_id,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.num_waiting_tokens,
            free_blocks=scheduler.pool.num_free,
            cached_blocks=scheduler.pool.num_cached,
            step_count=scheduler.num_steps,
            preemptions=scheduler.num_preemptions,
            tokens_per_second=self._rate.per_second(self._clock()),
            busy_us=self._busy_us,
            preparing=len(self._grammars),
            levels=scheduler.levels(),
        )


def _refused(first: Sequence, field: str, problem: str) -> Refusal:
    return Refusal(first.sequence_id, False, f"{field}: {problem}", field)
