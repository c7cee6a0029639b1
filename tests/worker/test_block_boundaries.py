"""KVC-01: lengths on and beside a block's end are computed like any other."""

import pytest
import torch

from tests.support.tiny_models import VOCAB, tiny_llama
from worker.attention.torch_backend import TorchBackend
from worker.block_pool import BlockPool
from worker.kv_cache import allocate_kv_cache
from worker.model_runner import ModelRunner
from worker.models.loader import open_checkpoint
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, SamplingParams, Sequence

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """transformers' model, and ours from the files that it wrote."""
    folder, theirs = tmp_path_factory.mktemp("tiny"), tiny_llama()
    theirs.save_pretrained(folder)
    return theirs, open_checkpoint(folder).load()


def greedy(theirs, prompt, count):
    """transformers' ids, each from all before it, without a cache."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(theirs(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def run(ours, sequence, max_model_len=256):
    """To its end; the blocks that it held after each step, and the tokens in them."""
    backend = TorchBackend()
    allocate_kv_cache(backend, ours.kv_spec, 17, BLOCK_SIZE)
    runner, held = ModelRunner(ours, backend, BLOCK_SIZE), []
    scheduler = Scheduler(
        BlockPool(16, BLOCK_SIZE), max_num_seqs=2, max_num_batched_tokens=256,
        max_model_len=max_model_len,
    )  # fmt: skip
    scheduler.add(sequence)
    while (output := scheduler.schedule()) is not None:
        for update in scheduler.update(output, runner.execute(output)):
            held.append((update.kv_tokens, update.kv_blocks))
    assert scheduler.pool.num_used == 0
    return held


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_every_length_gives_the_reference_s_ids_in_just_enough_blocks(pair, length):
    """The output ends one before, on and one after a block's end."""
    theirs, ours = pair
    prompt = [(7 * at + length) % (VOCAB - 3) + 3 for at in range(length)]
    to_the_end = 2 * BLOCK_SIZE - length % BLOCK_SIZE
    expected = greedy(theirs, prompt, to_the_end + 1)
    for count in (to_the_end - 1, to_the_end, to_the_end + 1):
        sequence = Sequence(1, prompt, GREEDY, count, 1)
        held = run(ours, sequence)
        assert sequence.output_token_ids == expected[:count]
        assert [tokens for tokens, _ in held] == list(range(length, length + count))
        assert all(blocks == -(-tokens // BLOCK_SIZE) for tokens, blocks in held)


@pytest.mark.parametrize("length", [250, 255])
def test_the_context_end_ends_a_sequence_that_nothing_else_ends(pair, length):
    """SCH-07: at exactly 256 tokens, the last of which is never computed."""
    _, ours = pair
    sequence = Sequence(1, [3 + at % 90 for at in range(length)], GREEDY, 256 - length, 1)
    held = run(ours, sequence)
    assert sequence.num_tokens == 256
    assert sequence.finish_reason is FinishReason.LENGTH
    assert held[-1] == (255, 16)
