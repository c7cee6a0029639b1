"""Many requests at once on the demo model: each equals its solo run, none is padded.

The whole form has thirty-two, prompts of 5 to 900 tokens, outputs of 3 to 120. Batching
changes the order of fp32 sums; where the two best logits of the solo run lie within 1e-4
either choice is right, and the comparison of that stream ends there.
"""

import math
from dataclasses import dataclass

import pytest

from tests.support.engines import BlockMemory
from worker.attention.torch_backend import TorchBackend
from worker.block_pool import BlockPool
from worker.kv_cache import allocate_kv_cache
from worker.model_runner import ModelRunner
from worker.models.loader import open_checkpoint
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams, Sequence

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

NEAR_TIE = 1e-4
NUM_BLOCKS, BLOCK_SIZE = 512, 16
WORDS = list(range(1000, 9000, 7))


@dataclass(frozen=True)
class Load:
    """Lengths of prompts and outputs; a step's budget; a pool for about four of them."""

    prompts: list[int]
    outputs: list[int]
    budget: int
    small_pool: int


SHORT = Load(
    prompts=[5 + (i * 29) % 60 for i in range(8)] + [90, 180],
    outputs=[3 + (i * 5) % 7 for i in range(8)] + [3, 12],
    budget=32,
    small_pool=24,
)
WHOLE = Load(
    prompts=[5 + (i * 29) % 90 for i in range(28)] + [300, 500, 700, 900],
    outputs=[3 + (i * 7) % 22 for i in range(28)] + [3, 120, 60, 90],
    budget=256,
    small_pool=4 * 64,
)


@pytest.fixture(
    scope="module",
    params=[SHORT, pytest.param(WHOLE, marks=pytest.mark.soak)],
    ids=["short", "whole"],
)
def load(request):
    return request.param


@pytest.fixture(scope="module")
def runner(demo_model_path):
    model, backend = open_checkpoint(demo_model_path).load(), TorchBackend()
    allocate_kv_cache(backend, model.kv_spec, NUM_BLOCKS + 1, BLOCK_SIZE)
    return ModelRunner(model, backend, BLOCK_SIZE)


def make_sequences(load):
    """Mixed so that long and short ones arrive in turn."""
    count = len(load.prompts)
    order = sorted(range(count), key=lambda i: i * 11 % count)
    return [
        Sequence(
            place,
            [WORDS[(i * 53 + at * 17) % len(WORDS)] for at in range(load.prompts[i])],
            SamplingParams(temperature=0.0),
            load.outputs[i],
            order=place,
            trace_steps=True,
        )
        for place, i in enumerate(order, start=1)
    ]


class Run:
    """Sequences through a scheduler of their own; keeps every step and every token."""

    def __init__(self, runner, load, sequences, *, num_blocks=NUM_BLOCKS, max_num_seqs=32):
        self.sequences = sequences
        self.steps = []
        self.tokens = {sequence.sequence_id: [] for sequence in sequences}
        self.finished_after = {}
        scheduler = Scheduler(
            BlockPool(num_blocks, BLOCK_SIZE),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=load.budget,
            max_model_len=2048,
        )
        for sequence in sequences:
            scheduler.add(sequence)
        fed = runner.num_positions_fed
        while (output := scheduler.schedule()) is not None:
            result = runner.execute(output)
            for update in scheduler.update(output, result):
                if update.sequence.finish_reason is not None:
                    self.finished_after[update.sequence.sequence_id] = output.step
            for sequence_id, token in result.tokens.items():
                self.tokens[sequence_id].append(token)
            self.steps.append(output)
        scheduler.check_integrity()
        assert scheduler.pool.num_used == 0
        assert runner.num_positions_fed - fed == sum(output.num_tokens for output in self.steps)

    def steps_of(self, sequence_id):
        return [
            o.step for o in self.steps if any(e.sequence_id == sequence_id for e in o.scheduled)
        ]


@pytest.fixture(scope="module")
def solo(runner, load):
    """Each stream's tokens when it runs alone."""
    tokens = {}
    for sequence in make_sequences(load):
        tokens |= Run(runner, load, [sequence]).tokens
    return tokens


@pytest.fixture(scope="module")
def together(runner, load):
    """All of them at once, with room for all."""
    return Run(runner, load, make_sequences(load))


def gap(token):
    """By how much the chosen logit leads the next."""
    return math.log(token.probability / token.runners_up[0][1])


def assert_equal_to_solo(run, solo):
    for sequence_id, alone in solo.items():
        assert len(run.tokens[sequence_id]) == len(alone)
        for at, (one, many) in enumerate(zip(alone, run.tokens[sequence_id], strict=True)):
            if one.token_id != many.token_id:
                assert gap(one) <= NEAR_TIE, f"stream {sequence_id}, output {at}: {gap(one)}"
                print(f"stream {sequence_id}, output {at}: two best {gap(one):.1e} apart")
                break


def test_together_they_equal_their_solo_runs_and_nothing_is_padded(load, together, solo):
    assert_equal_to_solo(together, solo)
    computed = sum(output.num_tokens for output in together.steps)
    assert computed == sum(load.prompts) + sum(load.outputs) - len(load.prompts)


def test_whoever_has_its_first_token_gets_one_at_every_step_beside_any_prefill(together):
    for sequence in together.sequences:
        steps = together.steps_of(sequence.sequence_id)
        drawn = steps[-sequence.max_tokens :]
        assert drawn == list(range(drawn[0], drawn[0] + sequence.max_tokens))
    chunks = [
        output
        for output in together.steps
        if any(e.num_tokens > 1 and e.first_position > 0 for e in output.scheduled)
    ]
    assert len(chunks) >= 6
    assert any(entry.num_tokens == 1 for output in chunks for entry in output.scheduled)


def test_a_pool_for_four_of_them_serves_all_in_order_of_arrival(runner, load, solo):
    run = Run(runner, load, make_sequences(load), num_blocks=load.small_pool)
    assert_equal_to_solo(run, solo)
    entered = [run.steps_of(sequence.sequence_id)[0] for sequence in run.sequences]
    assert entered == sorted(entered)
    assert entered[-1] > entered[0]


def test_who_finished_is_gone_and_who_waited_is_in_at_the_next_step(load):
    memory = BlockMemory(BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    run = Run(memory, load, make_sequences(load), max_num_seqs=4)
    entered = {s.sequence_id: run.steps_of(s.sequence_id)[0] for s in run.sequences}
    for sequence_id, last in run.finished_after.items():
        assert run.steps_of(sequence_id)[-1] == last
    waited = sorted(step for step in entered.values() if step > 1)
    assert waited
    # A place falls free for each that waited, and is taken at the step after, unless the
    # prompts before it still use the step's whole budget.
    full = {output.step for output in run.steps if output.num_tokens == load.budget}
    freed = sorted(run.finished_after.values())
    for place, step in zip(freed, waited, strict=False):
        assert step == place + 1 or all(s in full for s in range(place + 1, step))
