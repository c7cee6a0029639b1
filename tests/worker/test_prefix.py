"""Known prefixes are not computed again, and nothing else changes."""

import subprocess
import sys
from random import Random

import pytest

from tests.support.engines import BlockMemory, expected_output, make_scheduler, make_sequence
from worker.prefix import extend_digests, next_digest, root_digest


class System:
    """A scheduler over a small cache; `ask` runs one sequence to its end."""

    def __init__(self, **settings):
        self.scheduler = make_scheduler(**{"max_num_batched_tokens": 64, **settings})
        self.memory = BlockMemory(self.scheduler.pool)
        self.asked = 0

    def ask(self, prompt, max_tokens=5, **fields):
        (sequence,) = self.ask_together([prompt], max_tokens, **fields)
        return sequence

    def steps_of_last(self):
        """Positions per step of the sequence that came last."""
        entries = [entry for output in self.memory.outputs for entry in output.scheduled]
        return [entry.num_tokens for entry in entries if entry.sequence_id == self.asked]

    def ask_together(self, prompts, max_tokens=5, **fields):
        sequences = []
        for prompt in prompts:
            self.asked += 1
            sequences.append(make_sequence(self.asked, list(prompt), max_tokens, **fields))
            self.scheduler.add(sequences[-1])
        while (output := self.scheduler.schedule()) is not None:
            self.scheduler.update(output, self.memory.execute(output))
            self.scheduler.check_integrity()
        for sequence in sequences:
            expected = expected_output(sequence.prompt_token_ids, max_tokens)
            assert sequence.output_token_ids == expected
        return sequences


@pytest.mark.parametrize(
    ("length", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (31, 28), (32, 28), (33, 32)]
)
def test_all_full_blocks_are_found_again_but_never_the_last_token(length, cached):
    """PFX-01."""
    system = System()
    prompt = [(i * 7) % 100 for i in range(length)]
    assert system.ask(prompt).num_cached_tokens == 0
    for _ in range(2):
        fed = system.memory.num_positions_fed
        sequence = system.ask(prompt)
        assert sequence.num_cached_tokens == cached
        assert system.memory.num_positions_fed - fed == length - cached + 4
    assert all(entry.num_tokens for o in system.memory.outputs for entry in o.scheduled)


@pytest.mark.parametrize(("prompt", "reply"), [(10, 9), (3, 30), (16, 8), (7, 6), (1, 2)])
def test_the_next_turn_finds_every_full_block_of_the_last_one_its_reply_included(prompt, reply):
    """Its first token comes sooner, by just what was found; the others take their steps."""
    system, cold = System(), System()
    first = system.ask(list(range(prompt)), max_tokens=reply)
    turn = first.prompt_token_ids + first.output_token_ids + [3, 3]
    # The last token of the first turn was never computed.
    found = (prompt + reply - 1) // 4 * 4
    assert system.ask(turn).num_cached_tokens == found
    assert cold.ask(turn).num_cached_tokens == 0
    assert cold.steps_of_last() == [len(turn), 1, 1, 1, 1]
    assert system.steps_of_last() == [len(turn) - found, 1, 1, 1, 1]


def test_another_salt_finds_nothing_and_its_own_does():
    """PFX-03: to the second tenant the cache is cold, in positions and in steps."""
    system = System(max_num_batched_tokens=8)
    prompt, told = list(range(20)), []
    for salt in (b"a", b"b", b"a"):
        cached = system.ask(prompt, cache_salt=salt).num_cached_tokens
        told.append((cached, system.steps_of_last()))
    cold = (0, [8, 8, 4, 1, 1, 1, 1])
    assert told == [cold, cold, (16, [4, 1, 1, 1, 1])]


def test_two_equal_prompts_in_one_step_do_not_share_what_is_not_yet_computed():
    """PFX-07."""
    system = System()
    first, second = system.ask_together([range(20), range(20)])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)


def test_a_block_handed_out_again_is_not_found_under_its_old_content():
    """PFX-05: every answer is that of no cache at all."""
    system = System(num_blocks=16)
    prompts = [[base * 50 + i for i in range(12)] for base in range(12)]
    random = Random(3)
    for _ in range(500):
        system.ask(random.choice(prompts), max_tokens=4)
    assert len(system.scheduler.pool._block_of) <= 16


def test_shared_prefixes_survive_pressure_that_evicts_others():
    """PFX-07."""
    system = System(num_blocks=20, max_model_len=60)
    shared = [9] * 12
    for turn in range(20):
        system.ask_together([[*shared, turn, i] for i in range(5)], max_tokens=6)


def test_a_preempted_sequence_may_find_its_own_blocks_but_reports_only_its_first_hit():
    system = System(num_blocks=10, block_size=4, max_num_batched_tokens=16)
    sequences = system.ask_together([range(10), range(100, 112)], max_tokens=20)
    assert sequences[1].num_preemptions >= 1
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 0]


def test_caching_can_be_turned_off():
    system = System()
    system.scheduler._tables.caches_prefixes = False
    for _ in range(2):
        assert system.ask(range(20)).num_cached_tokens == 0
    assert system.scheduler.pool.num_cached == 0


def test_digests_frame_ids_and_depend_on_all_that_comes_before():
    """PFX-02: 32 bytes of SHA-256 over framed ids; no two chains meet."""
    root = root_digest(b"")
    different = {
        next_digest(root, [1, 23, 4]),
        next_digest(root, [12, 3, 4]),
        next_digest(root, [123, 4]),
        next_digest(root, [1, 2, 3, 4]),
        next_digest(root_digest(b"\0"), [1, 23, 4]),
        next_digest(next_digest(root, [1]), [23, 4]),
        root,
        root_digest(b"0"),
    }
    assert len(different) == 8
    assert all(len(digest) == 32 for digest in different)


def test_digests_are_the_same_in_every_process():
    code = "from worker.prefix import *; print(next_digest(root_digest(b'x'), [1, 2]).hex())"
    for seed in ("0", "random"):
        printed = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        assert printed.strip() == next_digest(root_digest(b"x"), [1, 2]).hex()


def test_digests_are_computed_once_per_block():
    sequence = make_sequence(1, list(range(20)))
    first = extend_digests(sequence, 3, 4)
    assert extend_digests(sequence, 5, 4)[:3] == first
    assert len(sequence.block_digests) == 5
    assert extend_digests(sequence, 2, 4) == first[:2]
