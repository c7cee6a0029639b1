"""That a step is launched before the last one has landed shows in no stream and no block."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engines import BlockMemory, expected_output, make_scheduler, make_sequence
from tests.support.late import LateMemory
from tests.support.tiny_models import VOCAB, tiny_llama
from worker.attention.torch_backend import TorchBackend
from worker.block_pool import BlockPool
from worker.engine import Engine
from worker.kv_cache import allocate_kv_cache
from worker.model_runner import ModelRunner
from worker.models.loader import open_checkpoint
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, LogitBias, SamplingParams, Sequence

PROMPTS = [[number * 37 + at * 11 for at in range(5)] for number in range(9)]


class Run:
    """An engine driven turn by turn, and what it delivered."""

    def __init__(self, scheduler, runner, ahead):
        self.scheduler, self.runner = scheduler, runner
        self.engine = Engine(scheduler, runner, look_ahead=100, steps_ahead=ahead)
        self.delivered, self.ended = {}, {}
        self.turns = 0

    def turn(self, intake=lambda engine: None):
        output = self.engine.step(lambda: intake(self.engine))
        self.turns += 1
        for update in output.updates:
            if update.token is not None:
                key = update.sequence.sequence_id
                assert key not in self.ended, "a token after its sequence's end"
                self.delivered.setdefault(key, []).append(update.token.token_id)
        for ended in output.ended:
            assert ended.sequence.sequence_id not in self.ended
            self.ended[ended.sequence.sequence_id] = ended
        self.scheduler.check_integrity()
        return output

    def drain(self, limit=3000):
        while self.engine.has_work:
            self.turn()
            assert self.turns < limit
        assert self.scheduler.pool.num_used == 0
        return self

    def streams(self):
        """What each got, as the stream said it and as the sequence holds it."""
        for key, ended in self.ended.items():
            assert self.delivered.get(key, []) == ended.sequence.output_token_ids
        return {
            key: (ended.sequence.output_token_ids, ended.sequence.finish_reason)
            for key, ended in self.ended.items()
        }


def run_of(ahead, **sizes):
    scheduler = make_scheduler(**sizes)
    runner = LateMemory(scheduler.pool) if ahead else BlockMemory(scheduler.pool)
    return Run(scheduler, runner, ahead)


def eos_at(prompt, index):
    return frozenset(expected_output(prompt, index + 1)[index:])


@pytest.mark.parametrize("index", range(6))
def test_a_stop_at_any_step_shows_nowhere_and_its_extra_position_is_counted(index):
    """The step after it was under way: computed for nobody, and no token of it is told."""
    run = run_of(1)
    run.engine.submit(make_sequence(1, PROMPTS[1], 6, eos=eos_at(PROMPTS[1], index)), 0.0)
    run.drain()
    assert run.streams() == {1: (expected_output(PROMPTS[1], index + 1), FinishReason.EOS)}
    ended = run.ended[1]
    late = int(index < 5)  # max_tokens is known before
    assert ended.account.computed_tokens == 5 + index + late
    assert ended.sequence.num_pending_tokens == late


def test_a_step_is_launched_before_the_last_has_landed():
    run = run_of(1)
    run.engine.submit(make_sequence(1, PROMPTS[1], 20), 0.0)
    run.drain()
    assert run.runner.overlapped == 19


def test_an_end_by_length_costs_nothing():
    """It is known before its token is: nothing is scheduled behind it."""
    for ahead in (0, 1):
        run = run_of(ahead)
        run.engine.submit(make_sequence(1, PROMPTS[1], 4), 0.0)
        assert run.drain().ended[1].account.computed_tokens == 5 + 3


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("at", range(9))
def test_an_abort_at_any_turn_frees_no_block_that_is_written_to(ahead, at):
    """And its neighbour, which could have got the blocks, says what it would have said."""
    run = run_of(ahead, num_blocks=10)
    run.engine.submit(make_sequence(1, PROMPTS[1], 8), 0.0)
    run.engine.submit(make_sequence(2, PROMPTS[2], 8), 0.0)
    for turn in range(at + 1):
        run.turn(lambda engine, last=turn == at: engine.abort(1) if last else None)
    run.engine.submit(make_sequence(3, PROMPTS[3], 8), 0.0)
    streams = run.drain().streams()
    output, reason = streams.pop(1)
    assert reason in (FinishReason.ABORTED, FinishReason.LENGTH)
    assert output == expected_output(PROMPTS[1], 8)[: len(output)]
    assert streams == {
        key: (expected_output(PROMPTS[key], 8), FinishReason.LENGTH) for key in (2, 3)
    }


def test_a_step_that_fails_when_it_lands_takes_its_own_sequences_alone():
    run = run_of(1, max_num_seqs=3)
    run.runner.failures[3] = RuntimeError("broken")
    run.engine.submit(make_sequence(1, PROMPTS[1], 20), 0.0)
    for _ in range(4):
        failure = run.turn(lambda engine: None).failure
    assert str(failure) == "broken"
    run.engine.submit(make_sequence(2, PROMPTS[2], 5), 0.0)
    run.drain()
    assert run.ended[1].failure == "the batch failed"
    assert run.streams()[2] == (expected_output(PROMPTS[2], 5), FinishReason.LENGTH)


def test_a_draw_that_depends_on_the_tokens_before_it_waits_for_them():
    """Penalties and grammars: every step lands before the next is launched."""
    run = run_of(1)
    penalised = SamplingParams(temperature=0.0, presence_penalty=1.0)
    run.engine.submit(Sequence(1, PROMPTS[1], penalised, 6, 1), 0.0)
    run.drain()
    assert run.streams()[1][0] == expected_output(PROMPTS[1], 6)
    assert run.runner.overlapped == 0


def test_what_a_draw_cannot_do_without_is_told_by_its_request():
    """Grammars like penalties; log-probabilities, biases and filters need no history."""
    needing = [
        {"grammar": object()}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1},
    ]  # fmt: skip
    for params in needing:
        assert Sequence(1, [1], SamplingParams(**params), 5, 1).draws_by_history
    free = SamplingParams(top_p=0.9, logprobs=3, min_tokens=2, logit_bias=LogitBias({1: 1.0}))
    assert not Sequence(1, [1], free, 5, 1).draws_by_history


def test_whoever_would_have_to_give_way_is_asked_when_nothing_is_in_flight():
    """Preemption takes blocks at once, so it waits until nobody writes to them."""
    run = run_of(1, num_blocks=8, max_num_seqs=4)
    for key in (1, 2, 3):
        run.engine.submit(make_sequence(key, PROMPTS[key], 14), 0.0)
    streams = run.drain().streams()
    assert sum(ended.sequence.num_preemptions for ended in run.ended.values()) > 0
    assert run.runner.overlapped > 0
    assert {key: ids for key, (ids, _) in streams.items()} == {
        key: expected_output(PROMPTS[key], 14) for key in (1, 2, 3)
    }


LIVES = st.lists(
    st.tuples(
        st.integers(1, 14),  # prompt
        st.integers(1, 12),  # max_tokens
        st.integers(0, 14),  # where its EOS is
        st.integers(0, 25),  # the turn it arrives in
        st.one_of(st.none(), st.integers(0, 25)),  # the turn it is aborted in
        st.booleans(),  # whether its draws depend on what it said
        st.integers(1, 3),  # choices
        st.integers(0, 2),  # priority
    ),
    min_size=1,
    max_size=7,
)


def life_of(run, lives):
    """Everything that is still under way; then what is left, to the end."""
    made = []
    for number, life in enumerate(lives):
        length, max_tokens, eos, arrives, gone, history, n, priority = life
        prompt = [(number * 37 + at * 11) % 1000 for at in range(length)]
        sampling = SamplingParams(
            temperature=0.0,
            eos_token_ids=eos_at(prompt, eos),
            frequency_penalty=0.5 if history else 0.0,
        )
        first, *others = (
            Sequence(
                key,
                prompt,
                sampling,
                max_tokens,
                order=key,
                priority=priority,
                choice=key - 10 * number,
            )
            for key in range(10 * number, 10 * number + n)
        )
        first.siblings = others
        made.append((first, arrives, gone))
    for turn in range(26):

        def intake(engine, now=turn):
            for first, arrives, gone in made:
                if arrives == now:
                    engine.submit(first, 0.0)
                if gone == now:
                    engine.abort(first.sequence_id)

        run.turn(intake)
    return run.drain()


@settings(max_examples=40, deadline=None)
@given(LIVES, st.integers(5, 24), st.integers(4, 20))
def test_any_life_says_the_same_overlapped_or_not(lives, num_blocks, budget):
    """Arrivals, stops, aborts and preemptions at any turn. Who is aborted says a beginning."""
    sizes = {"num_blocks": num_blocks, "max_num_seqs": 4, "max_num_batched_tokens": budget}
    with_, without = (life_of(run_of(ahead, **sizes), lives) for ahead in (1, 0))
    expected = without.streams()
    streams = with_.streams()
    assert streams.keys() == expected.keys()
    aborted = {10 * number for number, life in enumerate(lives) if life[4] is not None}
    for key, (output, reason) in streams.items():
        if key in aborted:
            shorter, longer = sorted((output, expected[key][0]), key=len)
            assert shorter == longer[: len(shorter)]
        else:
            assert (output, reason) == expected[key]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    return open_checkpoint(folder).load()


SAMPLED = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5, top_p=0.9),
    SamplingParams(seed=6, top_k=9, logprobs=2),
]


def on_torch(model, ahead, stops, aborts):
    """Three requests; `stops` are their EOS ids, `aborts` the tokens after which they go."""
    backend = TorchBackend()
    allocate_kv_cache(backend, model.kv_spec, 41, 4)
    scheduler = Scheduler(
        BlockPool(40, 4), max_num_seqs=4, max_num_batched_tokens=16, max_model_len=60
    )
    run = Run(scheduler, ModelRunner(model, backend, 4), ahead)
    for key, params in enumerate(SAMPLED):
        prompt = [(key * 31 + at * 7) % VOCAB for at in range(6)]
        eos = frozenset(stops.get(key, ()))
        sampling = SamplingParams(
            temperature=params.temperature, seed=params.seed, top_p=params.top_p,
            top_k=params.top_k, logprobs=params.logprobs, eos_token_ids=eos,
        )  # fmt: skip
        run.engine.submit(Sequence(key, prompt, sampling, 7, key), 0.0)
    while run.engine.has_work:
        run.turn()
        for key, count in aborts.items():
            if len(run.delivered.get(key, ())) == count:
                run.engine.abort(key)
    run.turn()
    assert scheduler.pool.num_used == 0
    return run.streams()


def test_on_the_torch_backend_stops_and_aborts_at_every_step_show_nowhere(model):
    whole = on_torch(model, 0, {}, {})
    assert on_torch(model, 1, {}, {}) == whole
    for key, index in product(range(3), range(7)):
        stops = {key: {whole[key][0][index]}}
        stopped = on_torch(model, 1, stops, {})
        assert stopped == on_torch(model, 0, stops, {})
        assert stopped[key][1] is FinishReason.EOS
        aborted = on_torch(model, 1, {}, {key: index + 1})
        assert aborted == on_torch(model, 0, {}, {key: index + 1})


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_higher_priority_takes_a_place_as_soon_as_what_is_in_flight_has_landed(ahead):
    """Nobody gives way while a step of its own is under way, and all say what they would have."""
    run = run_of(ahead, max_num_seqs=2)
    for key in (1, 2, 3):
        run.engine.submit(make_sequence(key, PROMPTS[key], 12, priority=-100), 0.0)
    first_turn = {}
    for turn in range(1, 60):
        if turn in (4, 8):
            run.engine.submit(make_sequence(turn, PROMPTS[turn], 3), 0.0)
        for update in run.turn().updates:
            first_turn.setdefault(update.sequence.sequence_id, turn)
    for key in (4, 8):
        assert first_turn[key] <= key + 2 * ahead
    assert 1 <= run.scheduler.num_preemptions <= 2
    lengths = {1: 12, 2: 12, 3: 12, 4: 3, 8: 3}
    assert run.drain().streams() == {
        key: (expected_output(PROMPTS[key], length), FinishReason.LENGTH)
        for key, length in lengths.items()
    }
