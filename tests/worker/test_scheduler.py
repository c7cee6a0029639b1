"""The scheduler advances everybody it can under one budget, and never loses a block."""

import pytest

from tests.support.engines import BlockMemory, expected_output, make_scheduler, make_sequence
from worker.scores import StepResult
from worker.sequence import FinishReason, SampledToken, SequenceStatus


def run_step(scheduler, memory):
    output = scheduler.schedule()
    if output is None:
        return None
    scheduler.update(output, memory.execute(output))
    scheduler.check_integrity()
    return output


def run_to_end(scheduler, memory, limit=2000):
    for _ in range(limit):
        if run_step(scheduler, memory) is None:
            return
    raise AssertionError(f"not finished after {limit} steps")


def counts(output):
    return {entry.sequence_id: entry.num_tokens for entry in output.scheduled}


def test_nothing_live_means_no_step():
    scheduler = make_scheduler()
    assert scheduler.schedule() is None
    assert scheduler.num_steps == 0


def test_a_sequence_is_prefilled_whole_and_then_decoded_one_position_a_step():
    scheduler = make_scheduler()
    memory = BlockMemory(scheduler.pool)
    scheduler.add(make_sequence(1, prompt=5, max_tokens=3))
    run_to_end(scheduler, memory)
    fed = [(o.scheduled[0].first_position, o.scheduled[0].num_tokens) for o in memory.outputs]
    assert fed == [(0, 5), (5, 1), (6, 1)]
    assert scheduler.pool.num_used == 0


def test_the_last_token_of_a_sequence_is_never_computed():
    scheduler = make_scheduler()
    memory = BlockMemory(scheduler.pool)
    scheduler.add(make_sequence(1, prompt=5, max_tokens=1))
    run_to_end(scheduler, memory)
    assert sum(output.num_tokens for output in memory.outputs) == 5


def test_prompt_chunks_run_beside_decodes_and_every_decode_advances_at_every_step():
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=4)
    memory = BlockMemory(scheduler.pool)
    for sequence_id in (1, 2):
        scheduler.add(make_sequence(sequence_id, prompt=2, max_tokens=10))
    run_step(scheduler, memory)
    scheduler.add(make_sequence(3, prompt=15, max_tokens=2))
    steps = [counts(run_step(scheduler, memory)) for _ in range(3)]
    assert steps == [{1: 1, 2: 1, 3: 6}, {1: 1, 2: 1, 3: 6}, {1: 1, 2: 1, 3: 3}]


def test_every_prompt_advances_at_every_step_though_the_first_ones_take_most():
    """Nobody waits for others' prompts: N = 1 in the scheduler's own words."""
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=4)
    memory = BlockMemory(scheduler.pool)
    for sequence_id in (1, 2, 3):
        scheduler.add(make_sequence(sequence_id, prompt=12))
    steps = [counts(run_step(scheduler, memory)) for _ in range(3)]
    assert steps == [{1: 6, 2: 1, 3: 1}, {1: 6, 2: 1, 3: 1}, {1: 1, 2: 6, 3: 1}]


def test_whoever_enters_leaves_a_block_to_spare_for_each_that_runs():
    """Otherwise the last to enter would be preempted at once."""
    for num_blocks, batch in ((4, {1}), (5, {1, 2})):
        scheduler = make_scheduler(num_blocks=num_blocks, block_size=4)
        for sequence_id in (1, 2):
            scheduler.add(make_sequence(sequence_id, prompt=8, max_tokens=4))
        assert set(counts(scheduler.schedule())) == batch


def test_a_chunk_that_is_not_the_last_draws_nothing():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_sequence(1, prompt=12))
    first = scheduler.schedule()
    assert first.scheduled[0].draw is None
    scheduler.update(first, {})
    assert scheduler.schedule().scheduled[0].draw.output_index == 0


@pytest.mark.parametrize("prompt", [31, 32, 33, 63, 64, 65, 96, 97])
def test_a_prompt_at_a_chunk_boundary_gets_exactly_one_first_token(prompt):
    """SCH-05."""
    scheduler = make_scheduler(max_num_batched_tokens=32, max_model_len=200)
    memory = BlockMemory(scheduler.pool)
    sequence = make_sequence(1, prompt=prompt, max_tokens=2)
    scheduler.add(sequence)
    run_to_end(scheduler, memory)
    assert sequence.output_token_ids == expected_output(sequence.prompt_token_ids, 2)
    assert all(output.num_tokens > 0 for output in memory.outputs)
    drawn = [o for o in memory.outputs if o.scheduled[0].draw is not None]
    assert len(drawn) == 2


def test_who_finished_is_gone_and_who_waited_is_in_at_the_very_next_step():
    scheduler = make_scheduler(max_num_seqs=2)
    memory = BlockMemory(scheduler.pool)
    for sequence_id, tokens in ((1, 2), (2, 5), (3, 2)):
        scheduler.add(make_sequence(sequence_id, prompt=3, max_tokens=tokens))
    batches = [set(counts(run_step(scheduler, memory))) for _ in range(3)]
    assert batches == [{1, 2}, {1, 2}, {2, 3}]


def test_the_waiting_enter_in_order_of_arrival_though_a_later_one_would_fit():
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=64)
    memory = BlockMemory(scheduler.pool)
    scheduler.add(make_sequence(1, prompt=16, max_tokens=4))
    run_step(scheduler, memory)
    scheduler.add(make_sequence(2, prompt=20, max_tokens=2))
    scheduler.add(make_sequence(3, prompt=2, max_tokens=2))
    assert set(counts(run_step(scheduler, memory))) == {1}
    run_to_end(scheduler, memory)
    first_steps = {}
    for output in memory.outputs:
        for entry in output.scheduled:
            first_steps.setdefault(entry.sequence_id, output.step)
    assert first_steps[1] < first_steps[2] <= first_steps[3]


def test_a_higher_priority_enters_first():
    scheduler = make_scheduler(max_num_seqs=1)
    memory = BlockMemory(scheduler.pool)
    for sequence_id, priority in ((1, 0), (2, 0), (3, 5)):
        scheduler.add(make_sequence(sequence_id, max_tokens=1, priority=priority))
    order = [next(iter(counts(run_step(scheduler, memory)))) for _ in range(3)]
    assert order == [3, 1, 2]


def test_blocks_are_taken_as_tokens_come():
    scheduler = make_scheduler(block_size=4)
    memory = BlockMemory(scheduler.pool)
    sequence = make_sequence(1, prompt=4, max_tokens=6)
    scheduler.add(sequence)
    used = []
    while run_step(scheduler, memory):
        used.append(len(sequence.block_ids))
    # Tokens held: 4, 5, 6, 7, 8, then the end.
    assert used == [1, 2, 2, 2, 2, 0]


def test_out_of_blocks_the_latest_gives_way_and_its_output_does_not_change():
    """SCH-02, SCH-04."""
    scheduler = make_scheduler(num_blocks=12, block_size=16, max_model_len=192)
    memory = BlockMemory(scheduler.pool)
    sequences = [make_sequence(i, prompt=80, max_tokens=80) for i in (1, 2)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_to_end(scheduler, memory)
    for sequence in sequences:
        assert sequence.output_token_ids == expected_output(sequence.prompt_token_ids, 80)
    assert sequences[0].num_preemptions == 0
    assert sequences[1].num_preemptions >= 1
    computed = sum(output.num_tokens for output in memory.outputs)
    assert computed <= 3 * 2 * (80 + 80)


def test_four_that_fit_only_alone_all_finish():
    """SCH-02."""
    scheduler = make_scheduler(num_blocks=14, block_size=16, max_model_len=192)
    memory = BlockMemory(scheduler.pool)
    sequences = [make_sequence(i, prompt=80, max_tokens=80) for i in range(1, 5)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_to_end(scheduler, memory)
    for sequence in sequences:
        assert sequence.output_token_ids == expected_output(sequence.prompt_token_ids, 80)
    assert sum(output.num_tokens for output in memory.outputs) <= 3 * 4 * 160


def test_what_can_never_fit_is_refused_with_both_numbers():
    """SCH-01: the small ones beside it end as ever, and then nothing is left to do."""
    scheduler = make_scheduler(num_blocks=8, block_size=16, max_model_len=1000)
    small = [make_sequence(sequence_id) for sequence_id in (8, 9)]
    for sequence in small:
        scheduler.add(sequence)
    with pytest.raises(ValueError, match="170 tokens need 11 KV blocks of 16; there are 8"):
        scheduler.add(make_sequence(1, prompt=120, max_tokens=50))
    with pytest.raises(ValueError, match="990 prompt tokens and max_tokens 50 exceed"):
        scheduler.add(make_sequence(2, prompt=990, max_tokens=50))
    run_to_end(scheduler, BlockMemory(scheduler.pool))
    assert [len(sequence.output_token_ids) for sequence in small] == [4, 4]
    assert scheduler.schedule() is None


def test_exactly_the_whole_pool_fits():
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_model_len=33)
    memory = BlockMemory(scheduler.pool)
    sequence = make_sequence(1, prompt=30, max_tokens=3)
    scheduler.add(sequence)
    run_to_end(scheduler, memory)
    assert len(sequence.output_token_ids) == 3


def test_the_context_end_ends_a_sequence():
    scheduler = make_scheduler(max_model_len=20)
    memory = BlockMemory(scheduler.pool)
    sequence = make_sequence(1, prompt=18, max_tokens=2)
    scheduler.add(sequence)
    run_to_end(scheduler, memory)
    assert sequence.num_tokens == 20
    assert sequence.finish_reason is FinishReason.LENGTH


def test_eos_counts_only_after_min_tokens():
    scheduler = make_scheduler()
    sequence = make_sequence(1, max_tokens=9, eos=frozenset({3}))
    object.__setattr__(sequence.sampling, "min_tokens", 2)
    scheduler.add(sequence)
    for _ in range(3):
        output = scheduler.schedule()
        scheduler.update(output, StepResult({1: SampledToken(3)}))
    assert sequence.output_token_ids == [3, 3, 3]
    assert sequence.finish_reason is FinishReason.EOS


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_takes_everything_back_wherever_the_sequence_is(steps):
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=2)
    memory = BlockMemory(scheduler.pool)
    scheduler.add(make_sequence(1, prompt=12))
    for _ in range(steps):
        run_step(scheduler, memory)
    assert scheduler.finish(1, FinishReason.ABORTED).status is SequenceStatus.FINISHED
    assert scheduler.finish(1, FinishReason.ABORTED) is None
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.pool.num_used) == (0, 0, 0)
    scheduler.check_integrity()


def test_a_sequence_that_ended_during_the_step_is_passed_over():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1))
    output = scheduler.schedule()
    scheduler.finish(1, FinishReason.ABORTED)
    assert scheduler.update(output, StepResult({1: SampledToken(4)})) == []
    assert scheduler.pool.num_used == 0


def test_a_deadline_drops_the_sequence_before_anything_is_computed():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, deadline=10.0))
    scheduler.add(make_sequence(2))
    assert scheduler.expire(9.9) == []
    assert [sequence.sequence_id for sequence in scheduler.expire(10.0)] == [1]
    assert set(counts(scheduler.schedule())) == {2}


def test_a_budget_below_the_number_of_sequences_is_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens 4 is below max_num_seqs 8"):
        make_scheduler(max_num_seqs=8, max_num_batched_tokens=4)


def with_siblings(sequence_id, n, prompt=9, max_tokens=3, **fields):
    """Choices of one request, the first of which computes the prompt."""
    ids = [(sequence_id * 37 + i * 11) % 1000 for i in range(prompt)]
    return [make_sequence(sequence_id + i, ids, max_tokens, choice=i, **fields) for i in range(n)]


@pytest.mark.parametrize("prompt", [1, 4, 5, 8, 9, 15])
def test_choices_share_one_prefill_and_compute_at_most_one_block_again(prompt):
    scheduler = make_scheduler(max_num_batched_tokens=8)
    memory = BlockMemory(scheduler.pool)
    first, *siblings = with_siblings(1, 4, prompt)
    scheduler.add(first, siblings)
    assert scheduler.num_waiting == 4
    run_to_end(scheduler, memory)
    assert first.output_token_ids == expected_output(first.prompt_token_ids, 3)
    assert [s.output_token_ids for s in siblings] == [first.output_token_ids] * 3
    again = prompt - (prompt - 1) // 4 * 4
    assert 1 <= again <= 4
    # Two decoded positions each: the last output token is never computed.
    assert memory.num_positions_fed == prompt + 3 * again + 4 * 2


def test_choices_stand_aside_until_the_prompt_is_computed():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    memory = BlockMemory(scheduler.pool)
    first, *siblings = with_siblings(1, 3, prompt=13)
    scheduler.add(first, siblings)
    batches = [set(counts(run_step(scheduler, memory))) for _ in range(3)]
    assert batches == [{1}, {1}, {1, 2, 3}]


@pytest.mark.parametrize("gone", [[1], [2], [1, 2], [2, 1], [3, 1]])
def test_the_choices_left_go_on_when_others_end_before_the_prompt_is_computed(gone):
    """The next one computes it; nobody stands aside for ever."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    memory = BlockMemory(scheduler.pool)
    choices = with_siblings(1, 4, prompt=13)
    scheduler.add(choices[0], choices[1:])
    run_step(scheduler, memory)
    for sequence_id in gone:
        scheduler.finish(sequence_id, FinishReason.ABORTED)
        scheduler.check_integrity()
    run_to_end(scheduler, memory)
    left = [c for c in choices if c.sequence_id not in gone]
    expected = expected_output(choices[0].prompt_token_ids, 3)
    assert [c.output_token_ids for c in left] == [expected] * len(left)
    assert scheduler.pool.num_used == 0


def test_choices_without_a_prefix_cache_compute_the_prompt_each():
    scheduler = make_scheduler()
    scheduler._tables.caches_prefixes = False
    memory = BlockMemory(scheduler.pool)
    first, *siblings = with_siblings(1, 2, prompt=9, max_tokens=1)
    scheduler.add(first, siblings)
    assert scheduler.num_waiting_tokens == 18
    run_to_end(scheduler, memory)
    assert memory.num_positions_fed == 18


def test_more_choices_than_places_take_turns():
    scheduler = make_scheduler(max_num_seqs=2)
    memory = BlockMemory(scheduler.pool)
    first, *siblings = with_siblings(1, 5)
    assert not scheduler.fits_now(first, siblings)
    scheduler.add(first, siblings)
    run_to_end(scheduler, memory)
    assert [len(s.output_token_ids) for s in (first, *siblings)] == [3] * 5


def test_choices_fit_by_places_and_by_blocks_of_their_own():
    """Nine tokens: three blocks for the first, one and a spare one for each other."""
    first, *siblings = with_siblings(1, 3)
    assert make_scheduler(num_blocks=7).fits_now(first, siblings)
    assert not make_scheduler(num_blocks=6).fits_now(first, siblings)
    assert not make_scheduler(max_num_seqs=2).fits_now(first, siblings)


def batch_of(scheduler):
    return {sequence.sequence_id for sequence in scheduler._running}


def test_a_higher_priority_takes_the_place_of_the_last_of_the_lowest_at_the_very_next_step():
    scheduler = make_scheduler(max_num_seqs=3)
    memory = BlockMemory(scheduler.pool)
    for sequence_id, priority in ((1, -5), (2, -9), (3, -9)):
        scheduler.add(make_sequence(sequence_id, max_tokens=9, priority=priority))
    run_step(scheduler, memory)
    scheduler.add(make_sequence(4, max_tokens=9, priority=-9))
    run_step(scheduler, memory)
    assert batch_of(scheduler) == {1, 2, 3}
    scheduler.add(make_sequence(5, max_tokens=9))
    assert 5 in counts(run_step(scheduler, memory))
    assert batch_of(scheduler) == {1, 2, 5}
    scheduler.add(make_sequence(6, max_tokens=2, priority=-7))
    run_step(scheduler, memory)
    assert batch_of(scheduler) == {1, 5, 6}
    run_to_end(scheduler, memory)


def test_work_of_a_low_priority_goes_on_once_others_stop_and_says_the_same():
    """Each arrival costs it one place at most; nothing is sent out once there are no more."""
    scheduler = make_scheduler(max_num_seqs=2, num_blocks=64)
    memory = BlockMemory(scheduler.pool)
    low = [make_sequence(number, max_tokens=20, priority=-100) for number in (1, 2, 3)]
    for sequence in low:
        scheduler.add(sequence)
    for number in range(10, 20):
        scheduler.add(make_sequence(number, max_tokens=1 + number % 3))
        run_step(scheduler, memory)
    assert 0 < scheduler.num_preemptions <= 10
    before = scheduler.num_preemptions
    waiting = [s for s in scheduler._waiting if s.priority == 0]
    run_to_end(scheduler, memory)
    assert scheduler.num_preemptions <= before + len(waiting)
    for sequence in low:
        assert sequence.output_token_ids == expected_output(sequence.prompt_token_ids, 20)


def test_nobody_gives_way_where_that_would_not_be_enough():
    scheduler = make_scheduler(max_num_seqs=2, num_blocks=10, block_size=4)
    memory = BlockMemory(scheduler.pool)
    for sequence_id, priority in ((1, 0), (2, -1)):
        scheduler.add(make_sequence(sequence_id, prompt=15, max_tokens=5, priority=priority))
    run_step(scheduler, memory)
    scheduler.add(make_sequence(3, prompt=30, max_tokens=1))
    run_step(scheduler, memory)
    assert (batch_of(scheduler), scheduler.num_preemptions) == ({1, 2}, 0)
    run_to_end(scheduler, memory)


def test_a_higher_priority_takes_blocks_where_places_are_free():
    scheduler = make_scheduler(max_num_seqs=8, num_blocks=10, block_size=4)
    memory = BlockMemory(scheduler.pool)
    for sequence_id in (1, 2):
        scheduler.add(make_sequence(sequence_id, prompt=15, max_tokens=5, priority=-1))
    run_step(scheduler, memory)
    urgent = make_sequence(3, prompt=15, max_tokens=5)
    assert scheduler.fits_now(urgent)
    assert not scheduler.fits_now(make_sequence(4, prompt=15, max_tokens=5, priority=-1))
    scheduler.add(urgent)
    run_step(scheduler, memory)
    assert batch_of(scheduler) == {1, 3}
    run_to_end(scheduler, memory)
