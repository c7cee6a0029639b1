"""A model on the native kernels: near fp32, and the same bits however it is computed."""

import multiprocessing
import random

import pytest
import torch

from tests.support.attention_steps import planned
from tests.support.native import VARIANT_NAMES, NativeForward, kernels, native_decoder
from tests.support.tiny_families import VOCAB, tiny_family
from tests.support.tiny_models import Forward, scheduled, tiny_llama
from worker.models.loader import open_checkpoint
from worker.models.registry import BUILDERS
from worker.native.binding import KernelError

PROMPT = [(index * 37 + 11) % VOCAB for index in range(41)]
BLOCKS = [7, 3, 12, 1, 30, 22]
# Qwen2 derives its head size: 32 with two heads of a hidden size of 64.
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SERVED = {
    "llama": {},
    "llama, llama3 rope": {},
    "mistral, window": {},
    "qwen2": TWO_HEADS,
    "qwen2, windows": TWO_HEADS,
    "qwen3": {},
    "qwen3, yarn rope": {},
}


@pytest.fixture(scope="module", params=SERVED)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_family(request.param, **SERVED[request.param]).save_pretrained(folder)
    return open_checkpoint(folder)


def rounded(checkpoint):
    """The same model by torch in fp32, on weights rounded to bf16."""
    weights = checkpoint.read(torch.bfloat16)
    build = BUILDERS[checkpoint.config.architecture]
    return build(checkpoint.config, {k: w.float() for k, w in weights.items()})


def in_chunks(forward, size):
    return torch.cat(
        [
            forward.logits(scheduled(0, PROMPT[at : at + size], at, BLOCKS))
            for at in range(0, len(PROMPT), size)
        ]
    )


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_logits_are_near_those_of_fp32_and_the_same_in_chunks(checkpoint, variant):
    """What is left is the rounding of keys, values and, where the CPU wants it, activations."""
    expected = in_chunks(Forward(rounded(checkpoint), block_size=16), 41)
    model = native_decoder(checkpoint, variant)
    ours = in_chunks(NativeForward(model), 41)
    assert (ours - expected).abs().mean() < 0.02 * expected.std()
    assert expected.std() > 0.1
    for size in (1, 7, 16):
        assert torch.equal(in_chunks(NativeForward(model), size), ours)


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_tied_and_padded_heads(variant, tmp_path):
    """131 ids are no multiple of a unit; a tied embedding is looked up in the packed head."""
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.vocab_size % 32
    expected = in_chunks(Forward(rounded(checkpoint), block_size=16), 41)
    ours = in_chunks(NativeForward(native_decoder(checkpoint, variant)), 41)
    assert (ours - expected).abs().mean() < 0.02 * expected.std()


@pytest.fixture
def forward(tmp_path):
    tiny_family("llama").save_pretrained(tmp_path)
    return NativeForward(native_decoder(open_checkpoint(tmp_path), "avx2"))


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**40])
def test_an_id_outside_the_vocabulary_is_refused_before_anything_is_computed(forward, token_id):
    with pytest.raises(KernelError, match="token id lies outside the vocabulary"):
        forward.logits(scheduled(0, [1, token_id], 0, BLOCKS))
    assert forward.backend._memory.isnan().all()


@pytest.mark.parametrize("block", [64, -1, 2**30])
def test_a_block_outside_the_cache_is_refused(forward, block):
    with pytest.raises(KernelError, match="lies outside the cache"):
        forward.logits(scheduled(0, PROMPT[:3], 0, [block]))


def test_a_length_beyond_its_blocks_is_refused(forward):
    metadata = planned([(20, 4)], 16)
    metadata.kv_lens[0] = 33
    forward.backend.plan(metadata)
    with pytest.raises(KernelError, match="length does not fit its block table"):
        forward.model.forward(
            torch.zeros(4, dtype=torch.int64), metadata.positions, forward.backend
        )


def test_three_hundred_sequences_share_a_step(forward):
    alone = forward.logits(scheduled(0, [5], 0, [3]))
    forward.backend.allocate(forward.model.kv_spec, 301, 16)
    entries = [scheduled(index, [5], 0, [300 - index]) for index in range(300)]
    assert torch.equal(forward.logits(*entries), alone.expand(300, -1))


def _step_in_child(forward, queue):
    try:
        forward.logits(scheduled(0, PROMPT[:3], 0, BLOCKS))
        queue.put("computed")
    except KernelError as error:
        queue.put(str(error))


def test_a_forked_child_is_refused_and_does_not_hang(forward):
    """Its threads do not exist there."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_step_in_child, args=(forward, queue))
    child.start()
    child.join(20)
    assert not child.is_alive()
    assert "forked" in queue.get()


class RealSequence:
    """97 ids through the demo model, in any cut; hidden states are compared, and logits."""

    def __init__(self, model, seed=7):
        self.model, self.random = model, random.Random(seed)
        self.ids = [self.random.randrange(49_000) for _ in range(97)]

    def hidden(self, cuts, cached=None, company=0):
        """Of the positions from where the cache ends; beside each cut, random others."""
        forward = cached or NativeForward(self.model)
        rows, at = [], 97 - sum(cuts)
        for count in cuts:
            others = [
                scheduled(index, [self.random.randrange(49_000)], 0, [40 + index])
                for index in range(self.random.randint(0, company))
            ]
            mine = scheduled(99, self.ids[at : at + count], at, list(range(20, 27)))
            rows.append(forward.hidden(*others, mine)[len(others) :])
            at += count
        return torch.cat(rows)


def assert_real_weights_are_row_exact(path, variant):
    model = native_decoder(open_checkpoint(path), variant)
    sequence = RealSequence(model)
    whole = sequence.hidden([97])
    for cuts in ([1] * 97, [7] * 13 + [6], [16] * 6 + [1], [64, 33]):
        assert torch.equal(sequence.hidden(cuts), whole)
    for _ in range(4):
        cuts = [sequence.random.randint(1, 40) for _ in range(2)]
        assert torch.equal(sequence.hidden([*cuts, 97 - sum(cuts)], company=9), whole)
    cached = NativeForward(model)
    cached.hidden(scheduled(99, sequence.ids[:48], 0, list(range(20, 27))))
    assert torch.equal(sequence.hidden([49], cached), whole[48:])
    logits = model.logits(whole[-14:])
    for rows in (1, 3, 12, 13):
        assert torch.equal(model.logits(whole[-rows:]), logits[-rows:])


@pytest.mark.model
def test_real_weights_give_the_same_bits_in_any_cut_and_company(demo_model_path):
    """One chunk; chunks of 1, 7, 16 and 64; random companions; a prefix found in the cache."""
    assert_real_weights_are_row_exact(demo_model_path, "auto")


@pytest.mark.model
@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_real_weights_give_the_same_bits_with_every_variant(demo_model_path, variant):
    assert_real_weights_are_row_exact(demo_model_path, variant)


def test_threads_are_counted():
    assert kernels("avx2", 3).threads == 3
