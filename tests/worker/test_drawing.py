"""Every way to a draw is the plain one: weigh all, put all in order, add up, look up."""

import random

import pytest
import torch

from worker import drawing
from worker.drawing import drawn
from worker.narrowing import can_narrow, largest, narrowed
from worker.ranking import likeliest
from worker.sequence import Draw, SamplingParams

# Multiples of a block and not; narrowed at no width, at some and at all.
VOCABULARIES = [7, 1000, 4099, 21_880, 49_152, 140_001]
CASES = 60


def plainly_drawn(logits, draw):
    """One row [vocab_size] in fp32, by the definitions, with one sort and no short cut."""
    params, vocab_size = draw.sampling, len(logits)
    scaled = (logits - logits.max()).div_(torch.tensor(params.temperature))
    weights = scaled.exp_()
    order = torch.sort(logits, descending=True, stable=True).indices
    top_k = min(params.top_k or vocab_size, vocab_size)
    kept = order[:top_k]
    if params.top_p < 1.0:
        # A whole row's weights are added up by id, those that top_k left by rank.
        total = weights[kept if top_k < vocab_size else slice(None)].cumsum(0)[-1]
        below = weights[kept].cumsum(0) < torch.tensor(params.top_p) * total
        kept = kept[: int(below.sum()) + 1]
    left = torch.zeros(vocab_size)
    left[kept] = weights[kept]
    left[left < torch.tensor(params.min_p)] = 0.0
    cumulative = left.cumsum(0)
    target = drawing._uniforms([draw])[0] * cumulative[-1]
    return int((cumulative > target).nonzero()[0])


def some_params(rng):
    return SamplingParams(
        temperature=rng.choice([1e-5, 0.3, 0.7, 1.0, 1.3, 2.0]),
        top_k=rng.choice([0, 0, 1, 2, 40, 64, 65, 256, 257, 1024, 5000, 10**9]),
        top_p=rng.choice([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 0.999999]),
        min_p=rng.choice([0.0, 0.0, 1e-6, 0.01, 0.3, 1.0]),
        seed=rng.getrandbits(64),
    )


def some_logits(rng, rows, vocab_size):
    """Peaked and flat ones, rounded to many ties, all alike, and mostly impossible."""
    logits = torch.randn(rows, vocab_size) * rng.choice([0.1, 1.0, 3.0, 8.0])
    match rng.randrange(5):
        case 0:
            return (logits * 2).round() / 2
        case 1:
            return torch.full_like(logits, rng.random())
        case 2:
            logits[:, torch.randperm(vocab_size)[: vocab_size * 9 // 10]] = -torch.inf
    return logits


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_each_row_of_a_mixed_batch_is_drawn_as_by_definition(vocab_size):
    rng = random.Random(vocab_size)
    torch.manual_seed(vocab_size)
    for _ in range(max(2, CASES // 8 if vocab_size < 10_000 else CASES // 16)):
        logits = some_logits(rng, 8, vocab_size)
        draws = [Draw(some_params(rng), rng.randrange(10_000), rng.randrange(4)) for _ in range(8)]
        expected = [plainly_drawn(*one) for one in zip(logits, draws, strict=True)]
        assert drawn(logits.clone(), logits.amax(-1), draws).tolist() == expected


@pytest.mark.parametrize("left_out", [drawing._LEFT_OUT, 0.0, 30.0])
def test_what_a_part_of_the_vocabulary_says_of_the_cut_changes_no_draw(left_out, monkeypatch):
    """Also where it tells nothing, or leads too high: flat rows, and such as it is blind to."""
    monkeypatch.setattr(drawing, "_LEFT_OUT", left_out)
    torch.manual_seed(11)
    flat = torch.randn(4, 40_000) * 1.5
    blind, seen = torch.full((2, 40_000), -3.0), torch.randn(2, 40_000)
    blind[:, :: drawing._SAMPLED] = torch.randn(2, 2_500) * 2
    seen[:, :: drawing._SAMPLED] = -20.0
    logits = torch.cat([flat, (flat * 4).round() / 4, blind, seen])
    draws = [Draw(SamplingParams(top_p=0.9, seed=row), row) for row in range(len(logits))]
    expected = [plainly_drawn(*one) for one in zip(logits, draws, strict=True)]
    assert drawn(logits.clone(), logits.amax(-1), draws).tolist() == expected


@pytest.mark.parametrize("vocab_size", [1000, 4099, 21_880])
def test_narrowed_rows_have_the_largest_values_and_all_above_the_bound(vocab_size):
    rows = (torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(3)) * 2).round(
        decimals=1
    )
    assert can_narrow(vocab_size, 6)
    near = narrowed(rows, 6)
    assert torch.equal(near.largest, rows.sort(descending=True).values[:, :6])
    for row, values, ids, bound in zip(rows, near.values, near.ids, near.bound, strict=True):
        assert torch.equal(row[ids], values)
        assert ids.tolist() == sorted(set(ids.tolist()))
        assert set((row > bound).nonzero().flatten().tolist()) <= set(ids.tolist())


def test_rows_that_are_short_are_not_narrowed():
    assert not can_narrow(320, 5)
    assert torch.equal(largest(torch.tensor([[1.0, 3.0, 2.0]]), 3), torch.tensor([[3.0, 2.0, 1.0]]))


@pytest.mark.parametrize("vocab_size", [30, 4099, 21_880])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_the_likeliest_are_in_order_and_of_equal_ones_the_lowest(vocab_size, count):
    torch.manual_seed(vocab_size)
    rows = torch.cat([torch.randn(3, vocab_size), torch.randn(3, vocab_size).round()])
    order = torch.sort(rows, descending=True, stable=True)
    ids, values = likeliest(rows, count)
    assert ids.tolist() == order.indices[:, :count].tolist()
    assert values.tolist() == order.values[:, :count].tolist()
