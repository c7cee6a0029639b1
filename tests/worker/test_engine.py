"""The engine books every sequence exactly once, whatever happens in its batch."""

import pytest

from tests.support.engines import BlockMemory, expected_output, make_scheduler, make_sequence
from worker.engine import Engine
from worker.engine_output import TokenRate
from worker.scores import StepResult
from worker.sequence import FinishReason


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class SlowRunner:
    """Takes a second per step, and raises on demand."""

    def __init__(self, pool, clock):
        self.memory = BlockMemory(pool)
        self.clock = clock
        self.failures = []

    def launch(self, output):
        return self.execute(output)

    def execute(self, output):
        self.clock.now += 1.0
        if self.failures:
            raise self.failures.pop()
        return self.memory.execute(output)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def engine(clock):
    scheduler = make_scheduler(num_blocks=32, max_num_seqs=4, max_num_batched_tokens=16)
    return Engine(scheduler, SlowRunner(scheduler.pool, clock), look_ahead=1, clock=clock)


def drain(engine):
    outputs = []
    while engine.has_work:
        outputs.append(engine.step())
    return outputs


def test_a_sequence_ends_once_with_its_durations(engine, clock):
    sequence = make_sequence(1, prompt=20, max_tokens=3)
    engine.submit(sequence, arrived=clock.now - 2.0)
    outputs = drain(engine)
    (ended,) = [ended for output in outputs for ended in output.ended]
    account = ended.account
    assert account.first_step - account.arrived == 2.0
    assert account.first_token - account.first_step == 2.0  # two chunks of the prompt
    assert account.ended - account.first_token == 2.0  # two decodes
    assert account.computed_tokens == 22
    assert account.device_us == 4_000_000
    assert ended.sequence.output_token_ids == expected_output(sequence.prompt_token_ids, 3)
    assert [list(output.begun) for output in outputs] == [[], [1], [], []]
    assert outputs[-1].load.running == 0
    assert outputs[-1].load.free_blocks == 32


def test_the_time_of_a_step_is_divided_by_positions_computed(engine, clock):
    engine.submit(make_sequence(1, prompt=9, max_tokens=1), clock.now)
    engine.submit(make_sequence(2, prompt=3, max_tokens=1), clock.now)
    output = engine.step()
    shares = {ended.sequence.sequence_id: ended.account.device_us for ended in output.ended}
    assert shares == {1: 750_000, 2: 250_000}


def test_beyond_the_look_ahead_a_sequence_without_room_is_refused(engine, clock):
    for sequence_id in range(1, 7):
        engine.submit(make_sequence(sequence_id, prompt=3, max_tokens=5), clock.now)
    output = engine.step()
    assert [(refusal.sequence_id, refusal.full) for refusal in output.refused] == [
        (5, True),
        (6, True),
    ]
    assert output.load.running == 4
    engine.submit(make_sequence(7, prompt=3), clock.now)
    engine.submit(make_sequence(8, prompt=3), clock.now)
    output = engine.step()
    assert [refusal.sequence_id for refusal in output.refused] == [8]
    assert output.load.waiting == 1


def test_full_blocks_refuse_although_places_are_free(engine, clock):
    for sequence_id in (1, 2):
        engine.submit(make_sequence(sequence_id, prompt=56, max_tokens=2), clock.now)
    engine.step()
    engine.submit(make_sequence(3, prompt=56), clock.now)
    engine.submit(make_sequence(4, prompt=56), clock.now)
    assert [refusal.sequence_id for refusal in engine.step().refused] == [4]


def test_what_could_never_run_is_refused_for_good_and_holds_nothing(engine, clock):
    engine.submit(make_sequence(1, prompt=120, max_tokens=50), clock.now)
    output = engine.step()
    assert [
        (refusal.full, "exceed the context" in refusal.message) for refusal in output.refused
    ] == [(False, True)]
    assert not engine.has_work


def test_a_batch_that_raises_takes_only_its_own_sequences(engine, clock):
    engine._flights._runner.failures.append(RuntimeError("broken"))
    engine.submit(make_sequence(1), clock.now)
    late = make_sequence(2)
    output = engine.step(lambda: engine.submit(late, clock.now))
    assert str(output.failure) == "broken"
    assert [(e.sequence.sequence_id, e.failure) for e in output.ended] == [(1, "the batch failed")]
    assert engine.scheduler.pool.num_used == 0
    drain(engine)
    assert late.output_token_ids == expected_output(late.prompt_token_ids, 4)


def test_a_sequence_that_could_not_be_drawn_fails_alone(engine, clock):
    """Its neighbours go on, and its blocks are found by nobody."""
    sequences = [make_sequence(i, prompt=9) for i in (1, 2)]
    for sequence in sequences:
        engine.submit(sequence, clock.now)
    drawn = engine._flights._runner.execute
    engine._flights._runner.execute = lambda output: StepResult(
        {key: token for key, token in drawn(output).tokens.items() if key != 1}
    )
    output = engine.step()
    assert output.failure is None
    assert [(e.sequence.sequence_id, e.failure) for e in output.ended] == [
        (1, "the logits were no numbers")
    ]
    drain(engine)
    assert sequences[1].output_token_ids == expected_output(sequences[1].prompt_token_ids, 4)
    assert engine.scheduler.pool.num_cached == 3


def with_siblings(sequence_id, n, **fields):
    prompt = [sequence_id, 3, 4, 5, 6]
    siblings = [make_sequence(sequence_id + i, prompt, choice=i, **fields) for i in range(1, n)]
    return make_sequence(sequence_id, prompt, siblings=siblings, **fields)


def test_a_request_with_siblings_is_refused_as_a_whole(engine, clock):
    for sequence_id in (1, 2, 3):
        engine.submit(make_sequence(sequence_id, prompt=3, max_tokens=9), clock.now)
    engine.step()
    engine.submit(make_sequence(4, prompt=3, max_tokens=9), clock.now)
    engine.submit(with_siblings(5, 3), clock.now)
    output = engine.step()
    assert [refusal.sequence_id for refusal in output.refused] == [5]
    assert (output.load.running, output.load.waiting) == (4, 0)


def test_siblings_have_accounts_of_their_own_and_leave_nothing(engine, clock):
    engine.submit(with_siblings(1, 3, max_tokens=2), clock.now)
    ended = [entry for output in drain(engine) for entry in output.ended]
    assert [entry.sequence.sequence_id for entry in ended] == [1, 2, 3]
    assert [entry.account.computed_tokens for entry in ended] == [6, 2, 2]
    assert engine.scheduler.pool.num_used == 0


def test_a_choice_that_came_complete_ends_without_a_step_and_the_others_go_on(engine, clock):
    sequence = with_siblings(1, 2, max_tokens=2)
    sequence.output_token_ids = [7, 8]
    engine.submit(sequence, clock.now)
    ended = [entry for output in drain(engine) for entry in output.ended]
    assert [(e.sequence.sequence_id, len(e.sequence.output_token_ids)) for e in ended] == [
        (1, 2),
        (2, 2),
    ]
    assert ended[0].account.computed_tokens == 0


def test_an_abort_during_a_step_leaves_nothing_at_its_end(engine, clock):
    engine.submit(make_sequence(1, max_tokens=50), clock.now)
    engine.step()
    output = engine.step(lambda: engine.abort(1))
    assert [e.sequence.finish_reason for e in output.ended] == [FinishReason.ABORTED]
    assert output.updates == []
    assert (output.load.running, output.load.waiting, output.load.free_blocks) == (0, 0, 32)


def test_an_abort_of_an_unknown_sequence_changes_nothing(engine):
    engine.abort(99)
    assert engine.step().is_empty


def test_expired_work_is_dropped_uncomputed(engine, clock):
    engine.submit(make_sequence(1, deadline=clock.now), clock.now)
    output = engine.step()
    assert [e.sequence.finish_reason for e in output.ended] == [FinishReason.EXPIRED]
    assert output.output is None
    assert output.ended[0].account.computed_tokens == 0


def test_the_rate_forgets_what_is_older_than_its_window():
    rate = TokenRate(window_s=1.0)
    rate.add(10.0, 4)
    rate.add(10.5, 2)
    assert rate.per_second(10.5) == 6
    assert rate.per_second(11.2) == 2
    assert rate.per_second(20.0) == 0


def test_nobody_finds_the_blocks_of_a_batch_that_went_wrong(engine, clock):
    prompt = list(range(20))
    engine.submit(make_sequence(1, prompt, max_tokens=9), clock.now)
    engine.step()
    engine._flights._runner.failures.append(RuntimeError("broken"))
    engine.step()
    assert engine.scheduler.pool.num_cached == 0
    again = make_sequence(2, prompt)
    engine.submit(again, clock.now)
    drain(engine)
    assert again.num_cached_tokens == 0


def test_what_waits_leaves_room_for_those_before_it(engine, clock):
    """32 blocks: five prompts of 6 blocks enter with their spare ones only four at a time."""
    for sequence_id in range(1, 7):
        engine.submit(make_sequence(sequence_id, prompt=24, max_tokens=5), clock.now)
    output = engine.step()
    assert output.load.running + output.load.waiting + len(output.refused) == 6
    assert output.load.waiting <= 1
