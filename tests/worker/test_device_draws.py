"""A device's draws are the host's, bit by bit where the device is the host."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.device.draws import draw, places
from worker.device.link import HostLink
from worker.device.told import described, told
from worker.logit_controls import adjust
from worker.sampler import sample
from worker.sequence import Draw, SamplingParams

LINK = HostLink()
FEW = st.sampled_from([-math.inf, -2.0, 0.0, 0.5, 0.5, 1.0, 3.0, 3.0])
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 9, 500]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.9]),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.sampled_from([0, 5]),
    eos_token_ids=st.sampled_from([frozenset(), frozenset({0}), frozenset({0, 2})]),
    logprobs=st.sampled_from([None, 0, 3]),
)
DRAWS = st.tuples(PARAMS, st.integers(0, 6), st.integers(0, 2), st.sampled_from([0, 4])).map(
    lambda fields: Draw(*fields)
)


def on_device(logits, draws):
    """As the runner does it; None for a row whose logits were no numbers."""
    logits = logits.clone()
    adjust(logits, draws, LINK.upload)
    drawn = draw(logits, draws, LINK)
    more = told(logits, drawn.ids, draws, LINK)
    tokens = described(drawn.ids.tolist(), draws, more)
    faulty = drawn.is_faulty.tolist()
    return [None if fault else token for token, fault in zip(tokens, faulty, strict=True)]


def assert_alike(ours, theirs):
    assert [t and t.token_id for t in ours] == [t and t.token_id for t in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None:
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert mine.probability == pytest.approx(other.probability, abs=1e-6)
            for named in ("alternatives", "runners_up"):
                pairs, others = getattr(mine, named), getattr(other, named)
                assert [i for i, _ in pairs] == [i for i, _ in others]
                assert [v for _, v in pairs] == pytest.approx([v for _, v in others], abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(3, 40))
def test_the_same_tokens_whatever_the_batch_asks_for(data, vocab_size):
    """Ties, impossible ids, barred ends, every mixture of filters."""
    draws = data.draw(st.lists(DRAWS, min_size=1, max_size=5))
    row = st.lists(FEW, min_size=vocab_size, max_size=vocab_size)
    logits = torch.tensor([data.draw(row) for _ in draws])
    assert_alike(on_device(logits, draws), sample(logits.clone(), draws))


@pytest.mark.parametrize("vocab_size", [2000, 5000])
def test_the_same_tokens_in_wide_rows(vocab_size):
    """Where the host looks at the likeliest blocks alone."""
    torch.manual_seed(1)
    params = [
        SamplingParams(seed=1), SamplingParams(seed=2, top_k=50),
        SamplingParams(seed=3, top_p=0.9), SamplingParams(seed=4, top_k=1500, top_p=0.99),
        SamplingParams(seed=5, min_p=0.02), SamplingParams(temperature=0.0),
    ]  # fmt: skip
    draws = [Draw(p, index) for p in params for index in range(8)]
    logits = torch.randn(len(draws), vocab_size) * 3
    assert_alike(on_device(logits, draws), sample(logits.clone(), draws))


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_p": 0.5}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_no_numbers_is_told_and_touches_no_other(params, bad):
    logits = torch.tensor([[0.0, 1.0, 2.0, bad], [0.0, 1.0, 2.0, -1.0]])
    draws = [Draw(SamplingParams(**params), 0)] * 2
    first, second = on_device(logits, draws)
    assert first is None
    assert second.token_id == sample(logits[1:].clone(), draws[1:])[0].token_id


def test_ids_of_rows_without_numbers_are_ids_all_the_same():
    """The step behind it reads an embedding by them."""
    logits = torch.full((3, 7), math.nan)
    logits[1], logits[2] = math.inf, -math.inf
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=3, top_k=2)):
        ids = draw(logits, [Draw(params, 0)] * 3, LINK).ids
        assert ((ids >= 0) & (ids < 7)).all()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_p": 0.5}])
def test_where_nothing_is_likely_the_lowest_id_that_is_not_barred_comes(params):
    ends = {"eos_token_ids": frozenset({0, 1}), "min_tokens": 2}
    draws = [Draw(SamplingParams(**params, **extra), 0) for extra in ({}, ends)]
    logits = torch.full((2, 6), -math.inf)
    assert [token.token_id for token in on_device(logits, draws)] == [0, 2]
    assert_alike(on_device(logits, draws), sample(logits, draws))


def test_a_sum_that_is_off_where_nothing_was_added_draws_nothing_excluded():
    """As parallel sums may be: up, and down again."""
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.0, 0.7, 0.0]])
    cumulative = torch.tensor([[0.1, 0.3, 0.5, 0.2, 1.0, 1.1]])
    for target, expected in ((0.0, 1), (0.2, 1), (0.35, 4), (0.49, 4), (0.999, 4)):
        assert places(weights, cumulative, torch.tensor([target])).tolist() == [expected]
