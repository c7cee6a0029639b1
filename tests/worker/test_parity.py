"""Greedy ids equal those of transformers, in fp32 on the same weights, however they are batched.

The reference is transformers' own greedy generation with its KV cache, recorded by
`tests.support.parity_reference`. Where its two best logits lie within 1e-4 of each other
either is right: such a place is printed and counted, and the sequence continues from the
reference's choice, so that every token is compared.
"""

from dataclasses import dataclass

import pytest

from tests.support.parity_reference import NUM_OUTPUTS, computed, recorded
from worker.attention.torch_backend import TorchBackend
from worker.block_pool import BlockPool
from worker.kv_cache import allocate_kv_cache
from worker.model_runner import ModelRunner
from worker.models.loader import open_checkpoint
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams, Sequence

NEAR_TIE = 1e-4
NUM_BLOCKS, BLOCK_SIZE = 512, 16

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Extent:
    """How many of the chats are compared (the shortest, and one of a few chunks), how far."""

    num_short: int
    long: tuple[int, ...]
    num_outputs: int


SHORT = Extent(4, (155,), 10)
WHOLE = Extent(20, (), NUM_OUTPUTS)


@pytest.fixture(
    scope="module",
    params=[SHORT, pytest.param(WHOLE, marks=pytest.mark.soak)],
    ids=["short", "whole"],
)
def references(request, demo_model_path):
    """References by chat, cut to what is compared."""
    extent, chats = request.param, recorded(demo_model_path)
    by_length = sorted(chats, key=lambda chat: len(chat.prompt))
    chosen = by_length[: extent.num_short]
    chosen += [chat for chat in by_length if len(chat.prompt) in extent.long]
    for chat in chosen:
        chat.output, chat.gaps = chat.output[: extent.num_outputs], chat.gaps[: extent.num_outputs]
    return chosen


@pytest.fixture(scope="module")
def runner(demo_model_path):
    model, backend = open_checkpoint(demo_model_path).load(), TorchBackend()
    allocate_kv_cache(backend, model.kv_spec, NUM_BLOCKS + 1, BLOCK_SIZE)
    return ModelRunner(model, backend, BLOCK_SIZE)


def run(runner, starts, max_num_seqs, max_num_batched_tokens):
    """Outputs by chat; `starts` gives prompt, output ids already known, how many are wanted."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(
        pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=2048, enable_prefix_caching=False,
    )  # fmt: skip
    sequences = {
        index: Sequence(
            index, prompt, SamplingParams(temperature=0.0), num_outputs, index,
            output_token_ids=list(known),
        )
        for index, (prompt, known, num_outputs) in starts.items()
    }  # fmt: skip
    for sequence in sequences.values():
        scheduler.add(sequence)
    fed = runner.num_positions_fed
    while (output := scheduler.schedule()) is not None:
        scheduler.update(output, runner.execute(output))
    assert pool.num_used == 0
    computed = sum(sequence.num_tokens - 1 for sequence in sequences.values())
    assert runner.num_positions_fed - fed == computed
    return {index: sequence.output_token_ids for index, sequence in sequences.items()}


def divergence(reference, output):
    """The first index at which the ids differ, None if they do not."""
    pairs = enumerate(zip(reference.output, output, strict=True))
    return next((at for at, (theirs, ours) in pairs if theirs != ours), None)


def near_ties(references, compute):
    """Follow the references with `compute(starts)`; where ours chose the other of two equals.

    Fails at a divergence that is not one.
    """
    ties = []
    starts = {index: (r.prompt, [], len(r.output)) for index, r in enumerate(references)}
    while starts:
        for index, output in compute(starts).items():
            reference = references[index]
            prompt, _, wanted = starts.pop(index)
            at = divergence(reference, output)
            if at is None:
                continue
            gap = reference.gaps[at]
            assert gap <= NEAR_TIE, f"chat {index}, output {at}: the reference leads by {gap}"
            ties.append((index, at, gap))
            if at + 1 < wanted:
                starts[index] = (prompt, reference.output[: at + 1], wanted)
    return ties


def assert_parity(references, compute):
    ties = near_ties(references, compute)
    total = sum(len(reference.output) for reference in references)
    for index, at, gap in ties:
        print(f"chat {index}, output {at}: the reference's two best lie {gap:.1e} apart")
    print(f"{len(ties)} of {total} tokens at near ties")
    assert len(ties) <= max(1, total / 1000)


def test_the_chats_are_what_is_claimed(demo_model_path):
    """Twenty prompts of 15 to 1,500 tokens, and outputs that are not all alike."""
    references = recorded(demo_model_path)
    lengths = sorted(len(reference.prompt) for reference in references)
    assert len(lengths) == 20
    assert lengths[0] == 15
    assert 1400 <= lengths[-1] <= 1500
    assert all(len(r.output) == len(r.gaps) == NUM_OUTPUTS for r in references)
    assert len({tuple(reference.output) for reference in references}) == 20


@pytest.mark.soak
def test_the_record_is_what_transformers_says(demo_model_path):
    """Other machines add in another order: where its two best logits are near, either is right."""
    for kept, now in zip(recorded(demo_model_path), computed(demo_model_path), strict=True):
        assert now.prompt == kept.prompt
        at = divergence(kept, now.output)
        assert at is None or kept.gaps[at] <= NEAR_TIE
        assert now.gaps[:at] == pytest.approx(kept.gaps[:at], rel=0.01, abs=1e-3)


def test_each_alone(references, runner):
    def compute(starts):
        alone = [run(runner, {index: start}, 1, 2048) for index, start in starts.items()]
        return {index: output for outputs in alone for index, output in outputs.items()}

    assert_parity(references, compute)


def test_all_in_one_batch(references, runner):
    """Every prompt in the first step, then as many decodes per step."""
    assert_parity(references, lambda starts: run(runner, starts, 20, 8192))


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(16, 16), (64, 20), (512, 20)])
def test_in_chunks(references, runner, budget, max_num_seqs):
    """Prompts are cut by the step's budget and computed beside others' decodes."""
    assert_parity(references, lambda starts: run(runner, starts, max_num_seqs, budget))
