"""Which sequences compute how many positions in the next step.

There is no prefill phase and no decode phase: every sequence's `num_computed_tokens`
catches up with its tokens under one budget per step, and the batch is recomposed at
every step (Yu et al. 2022, "Orca"; the formulation is vLLM V1's). Chunked prefill runs
beside decodes (Agrawal et al. 2023, "SARATHI"). No tensors here.
"""

from collections.abc import Sequence as Ids

from worker.block_pool import BlockPool
from worker.block_tables import BlockTables
from worker.deadlines import Deadlines
from worker.ending import reason_to_end, will_end
from worker.giving_way import giving_way, promised_blocks
from worker.levels import Level, levels_of, yielded_blocks
from worker.precedence import PrecedenceList
from worker.scheduled import SequenceUpdate, scheduled
from worker.scores import StepResult
from worker.sequence import (
    FinishReason,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
)
from worker.waiting import WaitingLine


class Scheduler:
    """Holds every live sequence: waiting (or preempted) ones, and the running batch.

    Precedence is priority, then order of arrival, in both; preemption takes from the
    other end. A sequence enters when a place is free and the blocks for all its known
    tokens are, with one block to spare for each running one, so that it is not preempted
    at once. Where they are not, running ones of lower priority, and never of its own, give
    way: the last of them, and no more than it takes.

    A sequence makes others give way to enter once at most, so that they go on when higher
    priorities stop arriving. For nobody of a lower priority enters before it while it waits,
    and if it has to give way itself, to a higher priority or as blocks run out, all of lower
    priority have done so before: none is running when it waits again.

    Nothing starves. A sequence fits in a step if a place and the blocks for its tokens are
    left by those that precede it, whether they run or wait with a higher priority. Once
    higher priorities stop arriving, it advances in every step in which it fits (N = 1): it
    keeps its place or enters in that step, as admission goes by precedence until somebody
    does not fit; its share is at least one position, as the budget is no smaller than the
    batch; and it gets its blocks, as those are given by precedence too.
    Each does fit in time. Let L be `max_model_len`. Who runs advances at every step or gives
    way, and has ended after fewer than L. While the most urgent of all waits nobody enters,
    so that after L steps the batch is empty, and it fits (`add` has checked). Once it runs
    it never gives way, and ends within L. So a sequence that r others precede has ended
    after 2L(r + 1) steps.

    Steps may be scheduled while earlier ones are in flight: what these draw is pending, and
    sequences go on behind it. Where a step needs to know it, or somebody has to give way,
    `schedule` gives none until it is booked.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {max_num_batched_tokens} is below max_num_seqs "
                f"{max_num_seqs}: running sequences could not all advance in one step"
            )
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self._tables = BlockTables(pool, caches_prefixes=enable_prefix_caching)
        self._live: dict[int, Sequence] = {}
        self._waiting = WaitingLine(self._tables)
        self._running = PrecedenceList()
        self._deadlines = Deadlines()
        self._step = self._landed_step = 0
        self._preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences not in the batch, those that stand aside included."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that waiting sequences have yet to compute."""
        return self._waiting.num_tokens

    @property
    def num_steps(self) -> int:
        return self._step

    @property
    def is_in_flight(self) -> bool:
        """Whether steps are being computed whose results are not booked."""
        return self._landed_step < self._step

    @property
    def num_preemptions(self) -> int:
        return self._preemptions

    def add(self, sequence: Sequence, siblings: Ids[Sequence] = ()) -> None:
        """Let a sequence wait, and further choices of its request until it has the prompt.

        Raises ValueError if it could never fit, whatever else runs.
        """
        self.check_fits(sequence)
        for choice in (sequence, *siblings):
            self._live[choice.sequence_id] = choice
            if choice.deadline is not None:
                self._deadlines.add(choice.deadline, choice.sequence_id)
        self._waiting.add(sequence, siblings)

    def fits_now(self, sequence: Sequence, siblings: Ids[Sequence] = ()) -> bool:
        """Whether one more sequence would enter at the next step, and its siblings after it.

        Those of lower priority are in nobody's way.
        """
        lower = [s for s in self._running if s.priority < sequence.priority]
        ahead = self._waiting.ahead_of(sequence.priority)
        places = self.max_num_seqs - len(self._running) + len(lower) - ahead.count
        # Whoever enters before the last takes a spare block besides, as in `_admit`.
        wanted = ahead.blocks + self.pool.blocks_for(sequence.num_tokens)
        wanted += sum(self._waiting.blocks_of(sibling, aside=True) for sibling in siblings)
        left = yielded_blocks(sum(len(s.block_ids) for s in lower), self.pool)
        left += sum(promised_blocks(s, self.pool) for s in lower)
        return places > len(siblings) and wanted <= self._spare_blocks() + left

    def num_waiting_ahead(self, priority: int) -> int:
        """Sequences not in the batch that one of this priority would not precede."""
        return self._waiting.ahead_of(priority).count

    def levels(self) -> list[Level]:
        """What each priority holds, the lowest first."""
        return levels_of(self._running, self._waiting.levels, self.pool)

    def finish(self, sequence_id: int, reason: FinishReason) -> Sequence | None:
        """End a sequence wherever it is and take its blocks back; None if it is not live."""
        sequence = self._live.pop(sequence_id, None)
        if sequence is None:
            return None
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._deadlines.discard(sequence_id)
        self._tables.release(sequence)
        self._waiting.promote_sibling(sequence_id)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        return sequence

    def fail(self, sequence_id: int) -> Sequence | None:
        """End a sequence whose computation went wrong; nobody finds its blocks again."""
        sequence = self._live.get(sequence_id)
        if sequence is not None:
            self.pool.withdraw(sequence.block_ids)
        return self.finish(sequence_id, FinishReason.ABORTED)

    def reason_to_end(self, sequence: Sequence) -> FinishReason | None:
        """Why a sequence that came with output ids has nothing left to do; None if it has."""
        return reason_to_end(sequence, self.max_model_len)

    def expire(self, now: float) -> list[Sequence]:
        """End every sequence whose deadline has passed, before anything is computed for it."""
        due = self._deadlines.take_due(now)
        ended = [self.finish(sequence_id, FinishReason.EXPIRED) for sequence_id in due]
        return [sequence for sequence in ended if sequence is not None]

    def schedule(self) -> SchedulerOutput | None:
        """The next step's batch. Takes the blocks it needs.

        None if nothing is live, or if it depends on what steps in flight will bring.
        """
        if not self._admit():
            return None
        batch = list(self._running)
        if self.is_in_flight:
            batch = [s for s in batch if not will_end(s, self.max_model_len)]
        shares = self._share_budget(batch)
        if self.is_in_flight and not self._can_look_ahead(batch, shares):
            return None
        entries = self._take_blocks(batch, shares)
        if not entries:
            return None
        self._step += 1
        num_tokens = sum(len(entry.token_ids) for entry in entries)
        if num_tokens > len(entries):
            entries.sort(key=lambda entry: entry.num_tokens > 1)
        return SchedulerOutput(self._step, tuple(entries), num_tokens)

    def update(self, output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """Book a step's results, in the order of steps. Who ended meanwhile is passed over."""
        self.give_up(output)
        updates = []
        for entry in output.scheduled:
            sequence = self._live.get(entry.sequence_id)
            if sequence is not None:
                updates.append(self._book(sequence, entry, result))
        return updates

    def give_up(self, output: SchedulerOutput) -> None:
        """Let a step have landed, with results or without: nothing is written by it any more."""
        self._landed_step = output.step
        self._tables.land(output.step)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block and every live sequence is accounted for."""
        held = (sequence.block_ids for sequence in self._live.values())
        self.pool.check_integrity([*held, *self._tables.left()])
        waiting = list(self._waiting)
        queued = [*waiting, *self._running]
        if len(queued) != len(self._live) or any(s.sequence_id not in self._live for s in queued):
            raise RuntimeError("live sequences and queues differ")
        if any(sequence.block_ids for sequence in waiting):
            raise RuntimeError("a waiting sequence holds blocks")
        self._waiting.check_integrity()

    def check_fits(self, sequence: Sequence) -> None:
        """Raises ValueError if it could never fit, whatever else runs."""
        longest = len(sequence.prompt_token_ids) + sequence.max_tokens
        if longest > self.max_model_len:
            raise ValueError(
                f"{len(sequence.prompt_token_ids)} prompt tokens and max_tokens "
                f"{sequence.max_tokens} exceed the context of {self.max_model_len} tokens"
            )
        if self.pool.blocks_for(longest - 1) > self.pool.num_blocks:
            raise ValueError(
                f"{longest} tokens need {self.pool.blocks_for(longest - 1)} KV blocks of "
                f"{self.pool.block_size}; there are {self.pool.num_blocks}"
            )

    def _admit(self) -> bool:
        """False if somebody waits for others to give way, of whom steps are in flight."""
        spare = self._spare_blocks() if self._may_anyone_enter else 0
        while self._may_anyone_enter:
            sequence = self._waiting.head
            cached = self._tables.find_cached(sequence)
            needed = self._tables.num_to_take(sequence, cached)
            if needed > spare or len(self._running) >= self.max_num_seqs:
                yielding = self._yielding_to(sequence, needed - spare, cached)
                if self.is_in_flight or not yielding:
                    return not yielding
                for each in yielding:
                    self._preempt(each)
                # Blocks that it found may have been held by them alone.
                spare, needed = self._spare_blocks(), self._tables.num_to_take(sequence, cached)
            self._waiting.remove(sequence)
            self._start(sequence, cached)
            spare -= needed + 1
        return True

    @property
    def _may_anyone_enter(self) -> bool:
        """Whether there is somebody to enter, and a place that is free or can be taken."""
        if not self._waiting.is_anyone_ready:
            return False
        if len(self._running) < self.max_num_seqs:
            return True
        return self._waiting.head.priority > self._running.least_urgent.priority

    def _yielding_to(
        self, sequence: Sequence, blocks: int, cached: list[int]
    ) -> list[Sequence] | None:
        """Who of lower priority leaves a place and so many more blocks; None if that cannot be."""
        return giving_way(
            self._running.least_first(),
            sequence.priority,
            self.pool,
            places=len(self._running) + 1 - self.max_num_seqs,
            blocks=blocks,
            kept=cached,
        )

    def _start(self, sequence: Sequence, cached: list[int]) -> None:
        self._tables.begin(sequence, cached)
        if sequence.status is SequenceStatus.WAITING:
            found = min(sequence.num_computed_tokens, len(sequence.prompt_token_ids))
            sequence.num_cached_tokens = found
        sequence.status = SequenceStatus.RUNNING
        self._running.add(sequence)

    def _spare_blocks(self) -> int:
        """Free blocks less what running sequences need for tokens they have, and one each."""
        promised = sum(promised_blocks(s, self.pool) for s in self._running)
        return self.pool.num_free - promised

    def _share_budget(self, batch: Ids[Sequence]) -> list[int]:
        """Positions for each of the running: one, and of the rest what the first can use."""
        left = self.max_num_batched_tokens - len(batch)
        shares = []
        for sequence in batch:
            more = sequence.num_uncomputed_tokens - 1
            if more:
                more = min(more, left)
                left -= more
            shares.append(1 + more)
        return shares

    def _can_look_ahead(self, batch: Ids[Sequence], shares: Ids[int]) -> bool:
        """Whether nothing has to be known of pending tokens, and nobody has to give way."""
        if any(s.num_pending_tokens and s.draws_by_history for s in batch):
            return False
        missing = map(self._tables.num_missing, batch, shares)
        return sum(missing) <= self.pool.num_free

    def _take_blocks(self, batch: Ids[Sequence], shares: Ids[int]) -> list[ScheduledSequence]:
        """Give blocks out in order of precedence; whoever is last gives way when they run out.

        Those who get theirs are in the next step from here on.
        """
        entries, step = [], self._step + 1
        for sequence, share in zip(batch, shares, strict=True):
            if sequence.status is not SequenceStatus.RUNNING:
                break
            missing = self._tables.num_missing(sequence, share)
            if missing and not self._make_room(sequence, missing):
                break
            entry = scheduled(sequence, share)
            sequence.last_step = step
            sequence.num_computed_tokens += share
            sequence.num_pending_tokens += entry.draw is not None
            entries.append(entry)
        return entries

    def _make_room(self, sequence: Sequence, missing: int) -> bool:
        """Take blocks, from less urgent sequences if need be; False if this one gave way."""
        while missing > self.pool.num_free and self._running.least_urgent is not sequence:
            self._preempt(self._running.least_urgent)
        if missing > self.pool.num_free:
            self._preempt(sequence)
            return False
        self._tables.extend(sequence, missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take everything back; the sequence computes all its tokens again later."""
        self._running.remove(sequence)
        self._tables.release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self._preemptions += 1
        self._waiting.add(sequence)

    def _book(
        self, sequence: Sequence, entry: ScheduledSequence, result: StepResult
    ) -> SequenceUpdate:
        kv_tokens = entry.end
        kv_blocks = self.pool.blocks_for(kv_tokens)
        if kv_tokens // self.pool.block_size > entry.first_position // self.pool.block_size:
            self._tables.publish(sequence, entry.first_position, kv_tokens)
        if self._waiting.num_aside and kv_tokens >= len(sequence.prompt_token_ids):
            self._waiting.call_siblings(sequence.sequence_id)
        scores = result.prompt_logprobs[entry.sequence_id] if entry.scoring else None
        if scores is not None:
            sequence.num_scored_tokens += len(scores.logprobs)
        token = result.tokens[entry.sequence_id] if entry.draw else None
        if token is not None:
            sequence.num_pending_tokens -= 1
            sequence.append(token.token_id)
            reason = reason_to_end(sequence, self.max_model_len)
            if reason is not None:
                self.finish(sequence.sequence_id, reason)
        return SequenceUpdate(sequence, entry, token, kv_tokens, kv_blocks, scores)
