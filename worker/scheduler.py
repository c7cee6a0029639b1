"""Which sequences compute how many positions in the next step.

There is no prefill phase and no decode phase: every sequence's `num_computed_tokens`
catches up with its tokens under one budget per step, and the batch is recomposed at
every step (Yu et al. 2022, "Orca"; the formulation is vLLM V1's). Chunked prefill runs
beside decodes (Agrawal et al. 2023, "SARATHI"). No tensors here.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from itertools import chain

from worker.block_pool import BlockPool
from worker.prefix import extend_digests
from worker.sequence import (
    Draw,
    FinishReason,
    SampledToken,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
)

RUNNERS_UP_TRACED = 4


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What one step did to one sequence; `token` is None for an inner chunk of its tokens.

    `kv_tokens` and `kv_blocks` are what it held at the end of the step, before a finished
    sequence gave its blocks back.
    """

    sequence: Sequence
    scheduled: ScheduledSequence
    token: SampledToken | None
    kv_tokens: int
    kv_blocks: int

    @property
    def is_first_token(self) -> bool:
        """Whether the token is the first that this worker chose for the sequence."""
        draw = self.scheduled.draw
        return draw is not None and draw.output_index == self.sequence.num_given_tokens


def _urgency(sequence: Sequence) -> tuple[int, int]:
    """Sorts the most urgent last: highest priority, then earliest arrival."""
    return (sequence.priority, -sequence.order)


class Scheduler:
    """Holds every live sequence: waiting (or preempted) ones, and the running batch.

    Precedence is priority, then order of arrival, in both; preemption takes from the
    other end. A sequence enters when a place is free and the blocks for all its known
    tokens are, with one block to spare for each running one, so that it is not preempted
    at once. Since the most urgent sequence is never preempted, something always advances.

    Further choices of a request stand aside until the first has computed the prompt. Then
    they find its full blocks in the prefix cache: each computes again what comes after the
    last of them, at most one block of the prompt.
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
        self._caches_prefixes = enable_prefix_caching
        self._live: dict[int, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        # By the id of the choice that computes their prompt.
        self._aside: dict[int, list[Sequence]] = {}
        self._step = 0
        self._preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences not in the batch, those that stand aside included."""
        return len(self._waiting) + self._num_aside

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that waiting sequences have yet to compute."""
        own = sum(s.num_tokens - self._num_shared(s) for s in self._standing_aside())
        return own + sum(sequence.num_uncomputed_tokens for sequence in self._waiting)

    @property
    def num_steps(self) -> int:
        return self._step

    @property
    def num_preemptions(self) -> int:
        return self._preemptions

    def add(self, sequence: Sequence, siblings: Ids[Sequence] = ()) -> None:
        """Let a sequence wait, and further choices of its request until it has the prompt.

        Raises ValueError if it could never fit, whatever else runs.
        """
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
        self._live[sequence.sequence_id] = sequence
        self._live.update((sibling.sequence_id, sibling) for sibling in siblings)
        self._let_wait(sequence, list(siblings))

    def fits_now(self, sequence: Sequence, siblings: Ids[Sequence] = ()) -> bool:
        """Whether one more sequence would enter at the next step, and its siblings after it."""
        # Whoever enters before the last takes a spare block besides, as in `_admit`.
        aside = [*self._standing_aside(), *siblings]
        wanted = sum(self._own_blocks(sibling) + 1 for sibling in aside)
        wanted += sum(self.pool.blocks_for(s.num_tokens) + 1 for s in self._waiting)
        wanted += self.pool.blocks_for(sequence.num_tokens)
        places = self.max_num_seqs - len(self._running) - len(self._waiting)
        return places > len(aside) and wanted <= self._spare_blocks()

    def finish(self, sequence_id: int, reason: FinishReason) -> Sequence | None:
        """End a sequence wherever it is and take its blocks back; None if it is not live."""
        sequence = self._live.pop(sequence_id, None)
        if sequence is None:
            return None
        self._take_out(sequence)
        self._release(sequence)
        if siblings := self._aside.pop(sequence_id, None):
            self._let_wait(siblings[0], siblings[1:])
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
        output = sequence.output_token_ids
        return self._ended_by(sequence, output[-1]) if output else None

    def expire(self, now: float) -> list[Sequence]:
        """End every sequence whose deadline has passed, before anything is computed for it."""
        late = [s for s in self._live.values() if s.deadline is not None and s.deadline <= now]
        for sequence in late:
            self.finish(sequence.sequence_id, FinishReason.EXPIRED)
        return late

    def schedule(self) -> SchedulerOutput | None:
        """The next step's batch, or None if nothing is live. Takes the blocks it needs."""
        self._admit()
        counts = self._share_budget()
        scheduled = self._take_blocks(counts)
        if not scheduled:
            return None
        scheduled.sort(key=lambda entry: entry.num_tokens > 1)
        self._step += 1
        return SchedulerOutput(
            self._step, tuple(scheduled), sum(entry.num_tokens for entry in scheduled)
        )

    def update(
        self, output: SchedulerOutput, tokens: Mapping[int, SampledToken]
    ) -> list[SequenceUpdate]:
        """Book a step's results. Sequences that ended while it ran are passed over."""
        updates = []
        for scheduled in output.scheduled:
            sequence = self._live.get(scheduled.sequence_id)
            if sequence is None:
                continue
            sequence.num_computed_tokens += scheduled.num_tokens
            self._publish(sequence, scheduled.first_position)
            if sequence.num_computed_tokens >= len(sequence.prompt_token_ids):
                self._call_siblings(sequence)
            kv_tokens, kv_blocks = sequence.num_computed_tokens, len(sequence.block_ids)
            token = tokens[scheduled.sequence_id] if scheduled.draw else None
            if token is not None:
                self._append(sequence, token.token_id)
            updates.append(SequenceUpdate(sequence, scheduled, token, kv_tokens, kv_blocks))
        return updates

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block and every live sequence is accounted for."""
        self.pool.check_integrity(sequence.block_ids for sequence in self._live.values())
        outside = [*self._waiting, *self._standing_aside()]
        queued = [*outside, *self._running]
        if len(queued) != len(self._live) or any(s.sequence_id not in self._live for s in queued):
            raise RuntimeError("live sequences and queues differ")
        if any(sequence.block_ids for sequence in outside):
            raise RuntimeError("a waiting sequence holds blocks")

    @property
    def _num_aside(self) -> int:
        return sum(map(len, self._aside.values()))

    def _standing_aside(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._aside.values())

    def _num_shared(self, sibling: Sequence) -> int:
        """Tokens in the full blocks of the prompt that one who stands aside will find."""
        if not self._caches_prefixes:
            return 0
        size = self.pool.block_size
        return (len(sibling.prompt_token_ids) - 1) // size * size

    def _own_blocks(self, sibling: Sequence) -> int:
        return self.pool.blocks_for(sibling.num_tokens - self._num_shared(sibling))

    def _let_wait(self, sequence: Sequence, siblings: list[Sequence]) -> None:
        """The first of a request's choices waits for a place, the others for its prompt."""
        insort(self._waiting, sequence, key=_urgency)
        if siblings:
            self._aside[sequence.sequence_id] = siblings

    def _call_siblings(self, sequence: Sequence) -> None:
        """Those who stood aside wait for places, now that the prompt's blocks can be found."""
        for sibling in self._aside.pop(sequence.sequence_id, ()):
            insort(self._waiting, sibling, key=_urgency)

    def _take_out(self, sequence: Sequence) -> None:
        """Remove a sequence from wherever it is."""
        for group in self._aside.values():
            if sequence in group:
                group.remove(sequence)
                return
        running = sequence.status is SequenceStatus.RUNNING
        self._remove(self._running if running else self._waiting, sequence)

    def _admit(self) -> None:
        if not self._waiting:
            return
        spare = self._spare_blocks()
        while self._waiting and len(self._running) < self.max_num_seqs:
            sequence = self._waiting[-1]
            cached = self._find_cached(sequence)
            needed = self.pool.blocks_for(sequence.num_tokens) - len(cached)
            needed += self.pool.num_unheld(cached)
            if needed > spare:
                return
            self._waiting.pop()
            self._start(sequence, cached)
            spare -= needed + 1

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's first tokens already; its last one is never among them,
        since only what is computed gives logits.
        """
        if not self._caches_prefixes:
            return []
        full = (sequence.num_tokens - 1) // self.pool.block_size
        return self.pool.find(extend_digests(sequence, full, self.pool.block_size))

    def _start(self, sequence: Sequence, cached: list[int]) -> None:
        self.pool.share(cached)
        sequence.block_ids = cached
        sequence.num_computed_tokens = len(cached) * self.pool.block_size
        if sequence.status is SequenceStatus.WAITING:
            found = min(sequence.num_computed_tokens, len(sequence.prompt_token_ids))
            sequence.num_cached_tokens = found
        sequence.status = SequenceStatus.RUNNING
        insort(self._running, sequence, key=_urgency)

    def _spare_blocks(self) -> int:
        """Free blocks less what running sequences need for tokens they have, and one each."""
        promised = sum(
            self.pool.blocks_for(s.num_tokens) - len(s.block_ids) + 1 for s in self._running
        )
        return self.pool.num_free - promised

    def _share_budget(self) -> dict[int, int]:
        """Positions per running sequence: one for each that needs just one, chunks of the rest.

        A decode therefore advances at every step, whatever is prefilled beside it; the
        budget is at least max_num_seqs, so something is left for the first chunk too.
        """
        counts: dict[int, int] = {}
        longer = []
        for sequence in reversed(self._running):
            if sequence.num_uncomputed_tokens == 1:
                counts[sequence.sequence_id] = 1
            else:
                longer.append(sequence)
        budget = self.max_num_batched_tokens - len(counts)
        for sequence in longer:
            counts[sequence.sequence_id] = min(sequence.num_uncomputed_tokens, budget)
            budget -= counts[sequence.sequence_id]
        return counts

    def _take_blocks(self, counts: dict[int, int]) -> list[ScheduledSequence]:
        """Give blocks out in order of precedence; whoever is last gives way when they run out."""
        scheduled = []
        for sequence in self._running[::-1]:
            count = counts[sequence.sequence_id]
            if not count or sequence.status is not SequenceStatus.RUNNING:
                continue
            missing = self._missing_blocks(sequence, count)
            if missing and not self._make_room(sequence, missing):
                break
            scheduled.append(self._entry(sequence, count))
        return scheduled

    def _make_room(self, sequence: Sequence, missing: int) -> bool:
        """Take blocks, from less urgent sequences if need be; False if this one gave way."""
        while missing > self.pool.num_free and self._running[0] is not sequence:
            self._preempt(self._running[0])
        if missing > self.pool.num_free:
            self._preempt(sequence)
            return False
        sequence.block_ids.extend(self.pool.allocate(missing))
        return True

    def _publish(self, sequence: Sequence, computed_before: int) -> None:
        """Let the blocks that this step has filled be found by later prompts."""
        size = self.pool.block_size
        first, end = computed_before // size, sequence.num_computed_tokens // size
        if first == end or not self._caches_prefixes:
            return
        digests = extend_digests(sequence, end, size)
        for index in range(first, end):
            self.pool.publish(sequence.block_ids[index], digests[index])

    def _missing_blocks(self, sequence: Sequence, count: int) -> int:
        needed = self.pool.blocks_for(sequence.num_computed_tokens + count)
        return max(0, needed - len(sequence.block_ids))

    def _entry(self, sequence: Sequence, count: int) -> ScheduledSequence:
        first = sequence.num_computed_tokens
        draw = None
        if first + count == sequence.num_tokens:
            runners_up = RUNNERS_UP_TRACED if sequence.trace_steps else 0
            draw = Draw(
                sequence.sampling,
                len(sequence.output_token_ids),
                sequence.choice,
                runners_up,
                sequence.token_counts,
            )
        ids = sequence.token_ids(first, first + count)
        return ScheduledSequence(sequence.sequence_id, ids, first, sequence.block_ids, draw)

    def _preempt(self, sequence: Sequence) -> None:
        """Take everything back; the sequence computes all its tokens again later."""
        self._remove(self._running, sequence)
        self._release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self._preemptions += 1
        insort(self._waiting, sequence, key=_urgency)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = 0

    def _append(self, sequence: Sequence, token_id: int) -> None:
        sequence.append(token_id)
        reason = self._ended_by(sequence, token_id)
        if reason is not None:
            self.finish(sequence.sequence_id, reason)

    def _ended_by(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        if len(sequence.output_token_ids) > sequence.sampling.min_tokens:
            if token_id in sequence.sampling.eos_token_ids:
                return FinishReason.EOS
            if token_id in sequence.sampling.stop_token_ids:
                return FinishReason.STOP_ID
        full = sequence.num_tokens >= self.max_model_len
        if full or len(sequence.output_token_ids) >= sequence.max_tokens:
            return FinishReason.LENGTH
        return None

    @staticmethod
    def _remove(queue: list[Sequence], sequence: Sequence) -> None:
        at = bisect_left(queue, _urgency(sequence), key=_urgency)
        if at == len(queue) or queue[at] is not sequence:
            raise RuntimeError(f"sequence {sequence.sequence_id} is not in its queue")
        del queue[at]
