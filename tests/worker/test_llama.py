"""The Llama family computes what transformers computes, however its positions are cut up."""

import pytest
import torch

from noria.models.rope import Rope
from tests.support.tiny_models import VOCAB, Forward, scheduled, step, tiny_llama
from worker.model_runner import ModelRunner
from worker.models.layers import rotate, rotation
from worker.models.loader import open_checkpoint
from worker.models.rope import frequencies
from worker.scores import StepResult

PROMPT = [(index * 37 + 11) % VOCAB for index in range(41)]
BLOCKS = [7, 3, 12, 1, 30, 22, 9, 15, 2, 18, 40, 5]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def pair(request, tmp_path_factory):
    """transformers' model, and ours from the files that it wrote."""
    folder = tmp_path_factory.mktemp("tiny")
    theirs = tiny_llama(tie_word_embeddings=request.param)
    theirs.save_pretrained(folder)
    return theirs, open_checkpoint(folder).load()


def expected(theirs, token_ids):
    """fp32 logits [T, vocab] of every position."""
    with torch.inference_mode():
        return theirs(torch.tensor([token_ids])).logits[0]


def assert_close(ours, theirs):
    assert ours.dtype is torch.float32
    assert (ours - theirs).abs().max() < 1e-4
    assert theirs.std() > 0.1


def test_a_whole_prompt(pair):
    theirs, ours = pair
    assert_close(Forward(ours).logits(scheduled(0, PROMPT, 0, BLOCKS)), expected(theirs, PROMPT))


@pytest.mark.parametrize("size", [1, 4, 16, 40])
def test_a_chunked_prompt(pair, size):
    """Chunks of every size, single positions (decode) included."""
    theirs, ours = pair
    forward = Forward(ours)
    chunks = [
        forward.logits(scheduled(0, PROMPT[at : at + size], at, BLOCKS))
        for at in range(0, len(PROMPT), size)
    ]
    assert_close(torch.cat(chunks), expected(theirs, PROMPT))


def test_sequences_in_one_batch_do_not_mix(pair):
    """Two decodes and a chunk beside each other equal three sequences alone."""
    theirs, ours = pair
    others = [PROMPT[::-1][:20], PROMPT[5:30]]
    tables = [BLOCKS[:7], [50, 51, 52, 53, 54], [41, 43, 42, 45, 44, 46, 47]]
    forward = Forward(ours)
    whole = [PROMPT[:25], *others]
    for index in (0, 1):
        forward.logits(scheduled(index, whole[index][:-1], 0, tables[index]))
    forward.logits(scheduled(2, whole[2][:10], 0, tables[2]))
    together = forward.logits(
        scheduled(0, whole[0][-1:], 24, tables[0]),
        scheduled(1, whole[1][-1:], 19, tables[1]),
        scheduled(2, whole[2][10:], 10, tables[2]),
    )
    alone = [expected(theirs, ids) for ids in whole]
    assert_close(together, torch.cat([alone[0][-1:], alone[1][-1:], alone[2][10:]]))


def test_lower_precision_stays_near_fp32(pair, tmp_path):
    theirs, _ = pair
    theirs.save_pretrained(tmp_path)
    ours = open_checkpoint(tmp_path).load(torch.bfloat16)
    logits = Forward(ours).logits(scheduled(0, PROMPT, 0, BLOCKS))
    assert logits.dtype is torch.float32
    assert (logits - expected(theirs, PROMPT)).abs().mean() < 0.05 * expected(theirs, PROMPT).std()


def test_rotation_turns_pairs_by_position_times_frequency():
    """By definition, in complex numbers: (x_i, x_{i + d/2}) times e^(i * position * theta_i)."""
    positions, heads = torch.tensor([0, 3, 500]), torch.randn(3, 2, 8)
    plain = frequencies(Rope(), 8)
    turns = torch.polar(torch.ones(3, 1, 4), positions[:, None, None] * plain)
    turned = torch.complex(heads[..., :4], heads[..., 4:]) * turns
    ours = rotate(heads, rotation(positions, plain))
    assert torch.allclose(ours, torch.cat([turned.real, turned.imag], dim=-1), atol=1e-4)
    assert torch.equal(ours[0], heads[0])


class Counting:
    """A model that notes how many rows it gives logits for."""

    def __init__(self, model):
        self._model, self.kv_spec, self.rows = model, model.kv_spec, []

    def forward(self, *arguments):
        return self._model.forward(*arguments)

    def logits(self, hidden):
        self.rows.append(len(hidden))
        return self._model.logits(hidden)


def runner(model):
    forward = Forward(model)
    return ModelRunner(model, forward.backend, forward.block_size)


def test_the_runner_samples_where_a_draw_is_and_counts_positions(pair):
    """Logits are computed for drawing sequences alone; greedy ids are transformers'."""
    theirs, ours = pair
    counting = Counting(ours)
    engine = runner(counting)
    inner = scheduled(5, PROMPT[:9], 0, [60, 61, 62])
    undrawn = type(inner)(5, inner.token_ids, 0, inner.block_ids, None)
    result = engine.execute(step(scheduled(3, PROMPT[:1], 0, [50]), undrawn,
                                 scheduled(8, PROMPT, 0, BLOCKS)))  # fmt: skip
    greedy = {3: expected(theirs, PROMPT[:1])[-1], 8: expected(theirs, PROMPT)[-1]}
    assert {i: token.token_id for i, token in result.tokens.items()} == {
        i: int(logits.argmax()) for i, logits in greedy.items()
    }
    assert counting.rows == [2]
    assert engine.num_positions_fed == 1 + 9 + 41


def test_a_step_without_draws_computes_no_logits(pair):
    counting = Counting(pair[1])
    entry = scheduled(1, PROMPT[:4], 0, [1])
    undrawn = type(entry)(1, entry.token_ids, 0, [1], None)
    assert runner(counting).execute(step(undrawn)) == StepResult()
    assert counting.rows == []


def test_warming_up_leaves_nothing_behind(pair):
    """Positions are counted from zero and the first answer is the same."""
    cold, warm = runner(pair[1]), runner(pair[1])
    warm.warm_up()
    assert warm.num_positions_fed == 0
    output = step(scheduled(1, PROMPT, 0, BLOCKS))
    assert warm.execute(output) == cold.execute(output)


def test_a_model_that_gives_no_numbers_does_not_warm_up(pair):
    """Finite weights can still overflow in a narrow dtype."""

    class Overflowing(Counting):
        def logits(self, hidden):
            return super().logits(hidden) + float("nan")

    with pytest.raises(ValueError, match="logits are NaN or infinite"):
        runner(Overflowing(pair[1])).warm_up()
