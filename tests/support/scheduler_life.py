"""A scheduler's life: operations in any order, and what must hold after each of them.

The language model is a function of the whole context as it is read through the block
tables (`BlockMemory`), so an endless pool would give `expected_output`: a wrong, lost,
stale or overwritten block changes ids. What is checked after every operation does not ask
the scheduler how it decides.
"""

from collections import Counter
from dataclasses import dataclass

from tests.support.engines import BlockMemory, expected_output, make_sequence
from worker.block_pool import BlockPool
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, SequenceStatus


@dataclass(frozen=True)
class Size:
    """What the scheduler has to do with."""

    num_blocks: int = 10
    block_size: int = 4
    max_num_seqs: int = 3
    budget: int = 7
    max_model_len: int = 40
    caching: bool = True


class SchedulerLife:
    """One scheduler and everything that ever came to it."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.scheduler = Scheduler(
            BlockPool(size.num_blocks, size.block_size),
            max_num_seqs=size.max_num_seqs,
            max_num_batched_tokens=size.budget,
            max_model_len=size.max_model_len,
            enable_prefix_caching=size.caching,
        )
        self.memory = BlockMemory(self.scheduler.pool)
        self.live = {}
        self.now = 0.0
        self.num_arrived = 0
        # Those of whom the scheduler said that they would enter at the next step.
        self._promised = set()
        # How often each made others give way to enter, and was forced out by a test.
        self.taken, self.forced = Counter(), Counter()
        self._preempt, self._start = self.scheduler._preempt, self.scheduler._start
        self.scheduler._preempt = self._noted_preempt
        self.scheduler._start = self._noted_start
        self.gone = []
        # Beginnings that were computed for a salt: only these may be found again.
        self._computed = set()

    # Operations.

    def arrive(self, prompt, max_tokens, n=1, **fields):
        """A request whose n choices share a prompt."""
        first = self.num_arrived + 1
        self.num_arrived += n
        choices = [
            make_sequence(first + i, prompt, max_tokens, choice=i, **fields) for i in range(n)
        ]
        self.live.update((choice.sequence_id, choice) for choice in choices)
        fits = self.scheduler.fits_now(choices[0], choices[1:])
        priority = choices[0].priority
        self._promised = {s for s in self._promised if self.live[s].priority >= priority}
        self._promised |= {first} if fits else set()
        self.scheduler.add(choices[0], choices[1:])

    def step(self, during=lambda: None):
        """One step, if there is anything to do; the entries of its batch by id.

        `during` happens while the batch is computed.
        """
        self.now += 1.0
        for late in self.scheduler.expire(self.now):
            assert late.deadline <= self.now
            self._end(late, FinishReason.EXPIRED)
        assert not any(s.deadline and s.deadline <= self.now for s in self.live.values())
        fitting = self.fitting()
        fresh = {i for i, s in self.live.items() if s.status is SequenceStatus.WAITING}
        output = self.scheduler.schedule()
        if output is None:
            assert not self.live
            return {}
        # Who else gave way did so for blocks that ran out.
        self.gone = []
        entries = {entry.sequence_id: entry for entry in output.scheduled}
        self._check_batch(output, entries, fitting)
        assert self._promised & self.live.keys() <= entries.keys(), "a promise was broken"
        for sequence_id in fresh & entries.keys():
            self._check_found(self.live[sequence_id])
        tokens = self.memory.execute(output)
        during()
        # What was promised meanwhile did not reckon with the step's tokens.
        self._promised = set()
        for update in self.scheduler.update(output, tokens):
            self._note_computed(update)
        return entries

    def abort(self, sequence_id, *, failed=False):
        """End one that is live, or was, or never came."""
        # A sibling that computes the prompt in its place needs more.
        self._promised = set()
        end = self.scheduler.fail if failed else self._abort
        ended = end(sequence_id)
        assert (ended is None) == (sequence_id not in self.live)
        if ended is not None:
            self._end(ended, FinishReason.ABORTED)

    def preempt(self, sequence_id):
        """Force one that runs out of the batch."""
        self.forced[sequence_id] += 1
        self._promised = set()
        self._preempt(self.live[sequence_id])

    def run_to_the_end(self):
        """Within the bound that the scheduler's docstring proves; nothing is held then."""
        for _ in range(2 * self.size.max_model_len * len(self.live) + 1):
            if not self.live:
                break
            self.step()
            self.check()
        assert not self.live
        scheduler = self.scheduler
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.pool.num_used) == (0, 0, 0)
        assert (scheduler.num_waiting_tokens, len(scheduler._deadlines)) == (0, 0)

    # What holds.

    def check(self):
        """After every operation: blocks conserved, everybody somewhere, salts apart."""
        scheduler, size = self.scheduler, self.size.block_size
        scheduler.check_integrity()
        assert scheduler.pool.num_free + scheduler.pool.num_used == self.size.num_blocks
        assert scheduler.num_running + scheduler.num_waiting == len(self.live)
        assert scheduler.num_waiting_tokens >= scheduler.num_waiting
        self._check_levels()
        owners = {}
        for sequence in self.live.values():
            table = sequence.block_ids
            assert len(set(table)) == len(table)
            assert sequence.num_computed_tokens <= len(table) * size
            for block in table[: sequence.num_computed_tokens // size]:
                assert owners.setdefault(block, sequence.cache_salt) == sequence.cache_salt

    def _check_levels(self):
        """What is told of each priority, and of blocks no more than would be free."""
        levels = {level.priority: level for level in self.scheduler.levels()}
        assert list(levels) == sorted({s.priority for s in self.live.values()})
        for priority, level in levels.items():
            own = [s for s in self.live.values() if s.priority == priority]
            running = [s for s in own if s.status is SequenceStatus.RUNNING]
            assert (level.running, level.waiting) == (len(running), len(own) - len(running))
            kept = [s.block_ids for s in self.live.values() if s.priority > priority]
            others = len({block for table in kept for block in table})
            assert level.yielded_blocks <= self.scheduler.pool.num_used - others
        told = sum(level.waiting_tokens for level in levels.values())
        assert told == self.scheduler.num_waiting_tokens
        if levels:
            assert levels[max(levels)].yielded_blocks == self.scheduler.pool.num_used

    def fitting(self):
        """Ids of those that fit in the next step whatever is cached: a place and blocks for
        their tokens are left by those that precede them.

        A running one may count on blocks that less urgent ones hold alone; a waiting one on
        free blocks and on those that running ones of lower priority hold alone, with one for
        each that runs beside it or enters before it to spare.
        """
        running = self._by_precedence(SequenceStatus.RUNNING)
        ready = self._by_precedence(SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
        aside = {s.sequence_id for a in self.scheduler._waiting._aside.values() for s in a}
        ready = [sequence for sequence in ready if sequence.sequence_id not in aside]
        entering = self._entering(running, ready)
        return entering | self._staying(running, ready[:1])

    def _staying(self, running, first):
        """Of the running; those of lower priority than one that waits may have to leave."""
        free = self.scheduler.pool.num_free + sum(map(self._alone, running))
        fitting = set()
        for sequence in running:
            free -= self._alone(sequence) + self._missing(sequence)
            if free < 0 or any(other.priority > sequence.priority for other in first):
                break
            fitting.add(sequence.sequence_id)
        return fitting

    def _entering(self, running, ready):
        fitting, taken = set(), 0
        for sequence in ready:
            beside = [s for s in running if s.priority >= sequence.priority]
            lower = [s for s in running if s.priority < sequence.priority]
            free = self.scheduler.pool.num_free + sum(map(self._alone, lower)) - taken
            free -= sum(self._missing(s) + 1 for s in beside)
            places = self.size.max_num_seqs - len(beside) - len(fitting)
            if places < 1 or free < self._missing(sequence):
                break
            fitting.add(sequence.sequence_id)
            taken += self._missing(sequence) + 1
        return fitting

    def _alone(self, sequence):
        """Blocks that nobody else holds."""
        pool = self.scheduler.pool
        return sum(pool.num_holders(block) == 1 for block in sequence.block_ids)

    def _by_precedence(self, *statuses):
        some = [s for s in self.live.values() if s.status in statuses]
        return sorted(some, key=lambda s: (-s.priority, s.order))

    def _missing(self, sequence):
        return self.scheduler.pool.blocks_for(sequence.num_tokens) - len(sequence.block_ids)

    def _check_batch(self, output, entries, fitting):
        assert output.num_tokens == sum(e.num_tokens for e in output.scheduled) <= self.size.budget
        assert 1 <= len(entries) == len(output.scheduled) <= self.size.max_num_seqs
        assert all(entry.num_tokens >= 1 for entry in output.scheduled)
        assert fitting <= entries.keys(), "one that fits did not advance"

    def _noted_preempt(self, sequence):
        """The scheduler's own; the last of a batch goes first."""
        before = self._by_precedence(SequenceStatus.RUNNING)
        assert sequence is before[-1]
        self.gone.append((sequence, list(sequence.block_ids)))
        self._preempt(sequence)

    def _noted_start(self, sequence, cached):
        """Whoever enters at the cost of others does so once, and sends out no more than it has
        to, of lower priority.
        """
        gone, self.gone = self.gone, []
        if gone:
            assert all(other.priority < sequence.priority for other, _ in gone)
            self.taken[sequence.sequence_id] += 1
            assert self.taken[sequence.sequence_id] <= 1 + self.forced[sequence.sequence_id]
            self._check_cleared(sequence, cached, *gone[-1])
        self._start(sequence, cached)

    def _check_cleared(self, sequence, cached, last_gone, its_table):
        pool, running = self.scheduler.pool, self._by_precedence(SequenceStatus.RUNNING)
        needed = self._missing(sequence) - sum(pool.num_holders(b) > 0 for b in cached)
        left = pool.num_free - sum(self._missing(s) + 1 for s in running) - needed
        assert left >= 0
        given = {b for b in its_table if not pool.num_holders(b)} - set(cached)
        given = len(given) + pool.blocks_for(last_gone.num_tokens) - len(its_table) + 1
        assert left < given or len(running) + 2 > self.size.max_num_seqs

    def _check_found(self, sequence):
        """Whatever was found in the cache has been computed, for the same salt."""
        found = sequence.num_cached_tokens
        assert found % self.size.block_size == 0
        assert found < len(sequence.prompt_token_ids)
        assert not found or self._beginning(sequence, found) in self._computed

    def _note_computed(self, update):
        sequence, size = update.sequence, self.size.block_size
        for end in range(update.scheduled.first_position // size * size, update.kv_tokens, size):
            self._computed.add(self._beginning(sequence, end + size))
        if sequence.finish_reason is not None:
            self._end(sequence, FinishReason.LENGTH)

    @staticmethod
    def _beginning(sequence, end):
        return sequence.cache_salt, tuple(sequence.token_ids(0, end))

    def _abort(self, sequence_id):
        return self.scheduler.finish(sequence_id, FinishReason.ABORTED)

    def _end(self, sequence, reason):
        """Its output is what an endless pool would have given, to wherever it came."""
        del self.live[sequence.sequence_id]
        self._promised.discard(sequence.sequence_id)
        assert sequence.finish_reason is reason
        assert sequence.block_ids == []
        output = sequence.output_token_ids
        assert output == expected_output(sequence.prompt_token_ids, len(output))
        assert reason is not FinishReason.LENGTH or len(output) == sequence.max_tokens
