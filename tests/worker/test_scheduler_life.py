"""Whatever happens in whatever order, nothing leaks, starves or differs.

KVC-02, CAN-04, SCH-02, SCH-08, PFX-05: arrivals, finishes, aborts at any point, failures,
priorities, deadlines, tiny pools, shared beginnings, choices and forced preemptions. A
seeded driver does many operations; the state machine finds short stories of a fault.
"""

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.scheduler_life import SchedulerLife, Size
from worker.sequence import SequenceStatus

SIZES = [
    Size(),
    Size(num_blocks=6, block_size=2, max_num_seqs=4, budget=4, max_model_len=12),
    Size(num_blocks=11, block_size=1, max_num_seqs=2, budget=3, max_model_len=12),
    Size(num_blocks=24, block_size=4, max_num_seqs=8, budget=30, max_model_len=64),
    Size(num_blocks=9, block_size=5, max_num_seqs=5, budget=16, max_model_len=44, caching=False),
]


class Driver:
    """Random operations from a seed; one life after another."""

    def __init__(self, size, seed):
        self.size, self.random = size, Random(seed)
        self.life, self.known = SchedulerLife(size), []
        self.counts = Counter()

    def live_on(self, num_operations):
        for done in range(1, num_operations + 1):
            self.operate()
            self.life.check()
            if done % 500 == 0:
                self.life.run_to_the_end()
                self.counts["preempted"] += self.life.scheduler.num_preemptions
                self.counts["gave way"] += self.life.taken.total()
                self.life, self.known = SchedulerLife(self.size), []
        return self

    def operate(self):
        kinds = ["step"] * 9 + ["arrive"] * 3 + ["abort", "preempt", "step and more"]
        kind = self.random.choice(kinds)
        running = self.running()
        if kind == "arrive" and len(self.life.live) < 12:
            self.arrive()
        elif kind == "abort":
            self.abort()
        elif kind == "preempt" and running:
            self.life.preempt(self.random.choice(running))
            self.counts["forced"] += 1
        elif kind == "step and more":
            self.step(self.random.choice([self.arrive, self.abort]))
        else:
            self.step()

    def running(self):
        return [i for i, s in self.life.live.items() if s.status is SequenceStatus.RUNNING]

    def arrive(self):
        """A known beginning, cut anywhere, and something of its own; any of three salts."""
        random, life = self.random, self.life
        pool_tokens = self.size.num_blocks * self.size.block_size
        room = min(self.size.max_model_len, pool_tokens + 1)
        beginning = random.choice(self.known or [[]])[: random.randint(0, room - 5)]
        prompt = [*beginning, *(random.randint(0, 3) for _ in range(random.randint(1, 4)))]
        n = random.choice([1, 1, 1, 2, 4])
        late = random.random() < 0.2
        life.arrive(
            prompt, random.randint(1, min(12, room - len(prompt))), n,
            priority=random.randint(-1, 1), cache_salt=random.choice([b"", b"a", b"b"]),
            deadline=life.now + random.randint(1, 60) if late else None,
        )  # fmt: skip
        self.known = [*self.known[-20:], prompt]
        self.counts["arrive"] += 1
        self.counts["choices"] += n > 1

    def step(self, during=lambda: None):
        deadlines = [s.deadline for s in self.life.live.values() if s.deadline]
        entries = self.life.step(during)
        batch = [self.life.live[i] for i in entries if i in self.life.live]
        self.counts["found"] += sum(s.num_cached_tokens > 0 for s in batch)
        self.counts["expired"] += sum(deadline <= self.life.now for deadline in deadlines)
        self.known += [s.prompt_token_ids + s.output_token_ids for s in batch[:1]]
        self.counts["step"] += 1

    def abort(self):
        """One that is live, mostly; sometimes one that has ended or has not come yet."""
        failed = self.random.random() < 0.2
        anyone = self.random.randint(1, self.life.num_arrived + 2)
        self.life.abort(self.random.choice([*self.life.live, anyone]), failed=failed)
        self.counts["failed" if failed else "aborted"] += 1


def live_on(size, num_operations, seed):
    counts = Driver(size, seed).live_on(num_operations).counts
    kinds = ["arrive", "choices", "step", "aborted", "failed", "expired", "forced"]
    assert all(counts[kind] > num_operations / 1000 for kind in kinds)
    assert counts["preempted"] > counts["forced"]
    assert counts["gave way"] > num_operations / 100
    assert (counts["found"] > 0) == size.caching


NAMES = ["common", "tight", "ones", "roomy", "uncached"]


@pytest.mark.parametrize("size", SIZES, ids=NAMES)
def test_any_operations_in_any_order(size):
    live_on(size, 8_000, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("size", SIZES, ids=NAMES)
def test_many_more_operations_in_any_order(size, seed):
    """300,000 of them in all."""
    live_on(size, 20_000, seed)


class RandomLife(RuleBasedStateMachine):
    """The same operations, told by hypothesis, which shortens the story of a fault."""

    def __init__(self):
        super().__init__()
        self.life = SchedulerLife(SIZES[0])
        self.known = [[1, 2, 3]]

    @rule(
        data=st.data(),
        tokens=st.integers(1, 10),
        priority=st.integers(-1, 1),
        n=st.sampled_from([1, 1, 1, 2, 5]),
        salt=st.sampled_from([b"", b"salt"]),
        patience=st.none() | st.integers(1, 20),
    )
    def arrive(self, data, tokens, priority, n, salt, patience):
        """Another's tokens, cut anywhere, and something of its own."""
        beginning = data.draw(st.sampled_from(self.known))[: data.draw(st.integers(0, 25))]
        prompt = beginning + data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        deadline = None if patience is None else self.life.now + patience
        self.life.arrive(prompt, tokens, n, priority=priority, cache_salt=salt, deadline=deadline)
        self.known.append(prompt)

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            for sequence_id in self.life.step():
                if sequence := self.life.live.get(sequence_id):
                    self.known.append(sequence.token_ids(0, sequence.num_tokens))

    @precondition(lambda self: self.life.num_arrived)
    @rule(data=st.data(), failed=st.booleans(), during=st.booleans())
    def abort(self, data, failed, during):
        sequence_id = data.draw(st.integers(1, self.life.num_arrived))
        if during:
            self.life.step(lambda: self.life.abort(sequence_id, failed=failed))
        else:
            self.life.abort(sequence_id, failed=failed)

    @rule(data=st.data())
    def preempt(self, data):
        live = self.life.live.items()
        running = [i for i, s in live if s.status is SequenceStatus.RUNNING]
        if running:
            self.life.preempt(data.draw(st.sampled_from(running)))

    @invariant()
    def everything_holds(self):
        self.life.check()

    def teardown(self):
        self.life.run_to_the_end()


RandomLife.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestRandomLife = RandomLife.TestCase
