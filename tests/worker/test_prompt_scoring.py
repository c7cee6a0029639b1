"""A prompt's log-probabilities are the model's own, each told once, however it is computed."""

import math

import pytest
import torch

from tests.support.engines import BlockMemory, expected_output, make_scheduler
from tests.support.tiny_models import VOCAB, tiny_llama
from worker import prompt_scoring
from worker.attention.torch_backend import TorchBackend
from worker.block_pool import BlockPool
from worker.engine import Engine
from worker.kv_cache import allocate_kv_cache
from worker.model_runner import ModelRunner
from worker.models.loader import open_checkpoint
from worker.prompt_scoring import scored
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams, Scoring, Sequence

BLOCK_SIZE = 4
PROMPT = [(7 * at * at + 3 * at + 1) % VOCAB for at in range(150)]
NEG = -math.inf


class Gathered:
    """What the updates of one sequence told of its prompt, row by row."""

    def __init__(self):
        self.rows = []

    def take(self, update):
        told = update.prompt_logprobs
        if told is None:
            return
        others = list(zip(told.alternative_ids, told.alternative_logprobs, strict=True))
        for own, count in zip(told.logprobs, told.num_alternatives, strict=True):
            self.rows.append((own, others[:count]))
            others = others[count:]
        assert not others


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny Llama of transformers and the same one of ours."""
    theirs, folder = tiny_llama(), tmp_path_factory.mktemp("tiny")
    theirs.save_pretrained(folder)
    return theirs, open_checkpoint(folder).load()


class Worker:
    """An engine over the tiny model; `told` has what each sequence says of its prompt."""

    def __init__(self, model, *, num_blocks=200, budget=512):
        backend = TorchBackend()
        allocate_kv_cache(backend, model.kv_spec, num_blocks + 1, BLOCK_SIZE)
        self.runner = ModelRunner(model, backend, BLOCK_SIZE)
        self.scheduler = Scheduler(
            BlockPool(num_blocks, BLOCK_SIZE),
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_model_len=400,
        )
        self.engine = Engine(self.scheduler, self.runner, look_ahead=100)
        self.told = {}

    def run(self, *sequences):
        for sequence in sequences:
            self.engine.submit(sequence, 0.0)
        failures = {}
        while self.engine.has_work:
            output = self.engine.step()
            for update in output.updates:
                number = update.sequence.sequence_id
                self.told.setdefault(number, Gathered()).take(update)
                # All is told before the first token, or with it.
                rows = len(self.told[number].rows)
                assert update.token is None or rows in (0, len(PROMPT) - 1)
            failures |= {e.sequence.sequence_id: e.failure for e in output.ended}
            self.scheduler.check_integrity()
        assert self.scheduler.pool.num_used == 0
        return failures


def sequence(number=1, count=3, *, prompt=PROMPT, max_tokens=4, **fields):
    params = SamplingParams(temperature=0.0, prompt_logprobs=count)
    return Sequence(number, prompt, params, max_tokens, order=number, scores_prompt=True, **fields)


def expected(model, prompt):
    """log_softmax over the vocabulary after each token but the last, [T - 1, vocab]."""
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)


def assert_equal(rows, shares, prompt, count):
    assert len(rows) == len(prompt) - 1
    for at, (own, others) in enumerate(rows):
        token_id = prompt[at + 1]
        assert own == pytest.approx(float(shares[at, token_id]), abs=1e-4)
        ranked = shares[at].sort(descending=True).indices.tolist()
        assert [i for i, _ in others] == [i for i in ranked if i != token_id][:count]
        likely = [float(shares[at, i]) for i, _ in others]
        assert [share for _, share in others] == pytest.approx(likely, abs=1e-4)


@pytest.mark.parametrize("budget", [7, 64, 512])
def test_values_are_those_of_transformers_whatever_the_chunk_size(pair, budget):
    theirs, ours = pair
    worker = Worker(ours, budget=budget)
    worker.run(sequence())
    assert_equal(worker.told[1].rows, expected(theirs, PROMPT), PROMPT, 3)


def test_neither_the_prefix_cache_nor_neighbours_change_what_is_told(pair):
    """The whole prompt is computed although it is cached, and is found by the next one."""
    worker = Worker(pair[1], budget=64)
    worker.run(sequence(1, 2))
    again, plain = sequence(2, 2), Sequence(3, PROMPT, SamplingParams(), 4, order=3)
    worker.run(again, plain)
    assert (again.num_cached_tokens, plain.num_cached_tokens) == (0, 148)
    assert_equal(worker.told[2].rows, expected(pair[0], PROMPT), PROMPT, 2)
    assert worker.told[3].rows == []


def test_what_was_told_before_a_preemption_is_not_told_again(pair):
    """Room for the prompt's 38 blocks, until a more urgent neighbour's output needs some."""
    worker = Worker(pair[1], num_blocks=42, budget=8)
    first, urgent = sequence(2, 2), Sequence(1, PROMPT[:8], SamplingParams(), 60, 1, priority=1)
    worker.run(urgent, first)
    assert first.num_preemptions > 0
    assert_equal(worker.told[2].rows, expected(pair[0], PROMPT), PROMPT, 2)
    # What has been scored may come from the cache like anything else.
    computed_again = worker.runner.num_positions_fed - (8 + 59) - (150 + 3)
    assert computed_again < 50


def test_logits_are_there_for_a_few_positions_at_a_time(pair, monkeypatch):
    """A chunk of 150 positions in slices of 64; none where nothing is asked for."""
    worker, sizes = Worker(pair[1]), []
    logits = pair[1].logits
    monkeypatch.setattr(
        pair[1], "logits", lambda hidden: sizes.append(len(hidden)) or logits(hidden)
    )
    worker.run(sequence(max_tokens=1))
    assert sizes == [1, 64, 64, 21]
    assert prompt_scoring._ROWS == 64
    sizes.clear()
    worker.run(Sequence(2, PROMPT, SamplingParams(), 1, order=2))
    assert sizes == [1]


def test_a_prompt_whose_logits_are_no_numbers_fails_alone(pair, monkeypatch):
    logits = pair[1].logits

    def faulty(hidden):
        rows = logits(hidden)
        if len(rows) == 64:
            rows[5, 3] = math.nan
        return rows

    monkeypatch.setattr(pair[1], "logits", faulty)
    other = Sequence(2, PROMPT[3:], SamplingParams(temperature=0.0), 4, order=2)
    failures = Worker(pair[1]).run(sequence(), other)
    assert failures == {1: "the logits were no numbers", 2: ""}


class Rows:
    """Hidden states that are logits already."""

    def __init__(self, rows):
        self.hidden = torch.tensor(rows)

    def scored(self, next_ids, count):
        return scored(lambda hidden: hidden, self.hidden, Scoring(0, next_ids, count))


def test_the_token_itself_and_impossible_ones_are_no_alternatives():
    """Equal ones are listed by id; an impossible token has no likelihood at all."""
    told = Rows([[0.0, 0.0, 0.0, NEG], [1.0, 3.0, 2.0, NEG], [0.0, NEG, NEG, NEG]]).scored(
        [1, 3, 0], 3
    )
    third = -math.log(3)
    assert told.logprobs == pytest.approx([third, NEG, 0.0])
    assert told.num_alternatives == [2, 3, 0]
    assert told.alternative_ids == [0, 2, 1, 2, 0]
    total = math.log(sum(math.exp(x) for x in (1, 2, 3)))
    likely = [third, third, 3 - total, 2 - total, 1 - total]
    assert told.alternative_logprobs == pytest.approx(likely, abs=1e-6)


def test_without_alternatives_only_the_prompt_is_told_of():
    told = Rows([[0.0, 0.0]]).scored([1], 0)
    assert (told.num_alternatives, told.alternative_ids) == ([0], [])
    assert told.logprobs == pytest.approx([-math.log(2)])


def test_further_choices_tell_nothing_and_find_the_prompt():
    """The engine's own bookkeeping, with a runner that says which position it scored."""
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=16)
    engine = Engine(scheduler, memory := BlockMemory(scheduler.pool), look_ahead=9)
    prompt, params = list(range(40)), SamplingParams(temperature=0.0, prompt_logprobs=1)
    siblings = [Sequence(2, prompt, params, 3, order=2, choice=1)]
    first = Sequence(1, prompt, params, 3, order=1, siblings=siblings, scores_prompt=True)
    engine.submit(first, 0.0)
    rows = {1: [], 2: []}
    while engine.has_work:
        for update in engine.step().updates:
            if update.prompt_logprobs is not None:
                rows[update.sequence.sequence_id] += update.prompt_logprobs.alternative_ids
    assert rows == {1: prompt[1:], 2: []}
    assert first.output_token_ids == siblings[0].output_token_ids == expected_output(prompt, 3)
    assert memory.num_positions_fed == 40 + 2 + 4 + 2


def test_a_prompt_of_one_token_has_nothing_to_tell():
    scheduler = make_scheduler()
    engine = Engine(scheduler, BlockMemory(scheduler.pool), look_ahead=9)
    engine.submit(sequence(prompt=[5], max_tokens=1), 0.0)
    (update,) = engine.step().updates
    assert (update.prompt_logprobs, update.token is None) == (None, False)
