"""Tokens are chosen by address: right frequencies, and nothing but the address matters."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker import sampler
from worker.sampler import LogitsError, sample
from worker.sequence import Draw, SamplingParams

NEG = -math.inf
LOGITS = [0.3, 2.0, -1.0, 1.1, 0.0, 2.4, -3.0, 1.9, 0.7, -0.2]


def draw(index=0, choice=0, runners_up=0, **params):
    return Draw(SamplingParams(**params), index, choice, runners_up)


def choose(logits, *draws):
    """Ids chosen for the draws, each from its own copy of the same logits."""
    matrix = torch.tensor(logits).repeat(len(draws), 1)
    return [token.token_id for token in sample(matrix, draws)]


def distribution(temperature, top_k, top_p):
    """The probabilities by definition, in float64, for logits without ties."""
    weights = {i: math.exp((logit - max(LOGITS)) / temperature) for i, logit in enumerate(LOGITS)}
    likeliest = sorted(weights, key=weights.get, reverse=True)[: top_k or len(LOGITS)]
    mass, total, kept = 0.0, sum(weights[i] for i in likeliest), []
    for i in likeliest:
        kept.append(i)
        mass += weights[i]
        if mass >= top_p * total:
            break
    return {i: weights[i] / mass for i in kept}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.7), (0.9, 5, 0.8)],
)
def test_frequencies_follow_the_distribution(temperature, top_k, top_p):
    """Chi-square over 20,000 draws; five standard deviations are allowed."""
    expected = distribution(temperature, top_k, top_p)
    draws = [
        draw(i, seed=11, temperature=temperature, top_k=top_k, top_p=top_p) for i in range(20_000)
    ]
    counts = torch.bincount(torch.tensor(choose(LOGITS, *draws)), minlength=len(LOGITS)).tolist()
    assert {i for i, count in enumerate(counts) if count} <= set(expected)
    statistic = sum((counts[i] - 20_000 * p) ** 2 / (20_000 * p) for i, p in expected.items())
    freedom = len(expected) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_greedy_takes_the_lowest_of_equal_ids():
    assert choose([0.0, 3.0, 1.0, 3.0, 3.0], draw(temperature=0.0)) == [1]
    wide = torch.zeros(1, 5001)
    wide[0, [4321, 77, 5000]] = 9.0
    assert sample(wide, [draw(temperature=0.0)])[0].token_id == 77


@pytest.mark.parametrize(
    "same",
    [
        {"top_k": 3},
        {"top_k": 3, "top_p": 0.9999},
        {"top_p": 0.74},
        {"top_k": 5, "top_p": 0.8},
    ],
)
def test_filters_that_leave_the_same_candidates_draw_the_same(same):
    """Three candidates are left by each; the draws equal those of a masked vocabulary."""
    kept = sorted(range(len(LOGITS)), key=lambda i: -LOGITS[i])[:3]
    masked = [logit if i in kept else NEG for i, logit in enumerate(LOGITS)]
    assert set(distribution(1.0, same.get("top_k", 0), same.get("top_p", 1.0))) == set(kept)
    filtered = choose(LOGITS, *(draw(i, seed=3, **same) for i in range(500)))
    assert filtered == choose(masked, *(draw(i, seed=3) for i in range(500)))


def test_filters_that_filter_nothing_change_nothing():
    plain = choose(LOGITS, *(draw(i, seed=9) for i in range(200)))
    for idle in ({"top_k": 10}, {"top_k": 10**9}, {"top_k": 0, "top_p": 1.0}):
        assert choose(LOGITS, *(draw(i, seed=9, **idle) for i in range(200))) == plain


@pytest.mark.parametrize("one", [{"top_k": 1}, {"top_p": 1e-9}, {"top_k": 1, "top_p": 1e-9}])
def test_one_candidate_is_the_greedy_choice(one):
    logits = [1.0, 5.0, 5.0, 0.0]
    assert choose(logits, *(draw(i, seed=i, **one) for i in range(50))) == [1] * 50


def test_ties_at_the_cut_go_to_lower_ids():
    """top_k and top_p keep the lowest of equally likely ids, also with more ties than asked."""
    logits = [1.0, 4.0] + [2.0] * 8
    k3 = choose(logits, *(draw(i, seed=1, top_k=3) for i in range(400)))
    assert set(k3) == {1, 2, 3}
    flat = [0.0] * 10
    assert set(choose(flat, *(draw(i, seed=1, top_p=0.3) for i in range(400)))) == {0, 1, 2}


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 70}, {"top_k": 2000, "top_p": 0.5}])
def test_the_widths_looked_at_do_not_matter(params, monkeypatch):
    """Cuts beyond the first widths equal those found by one sort of the vocabulary."""
    logits = (torch.randn(12_000, generator=torch.Generator().manual_seed(5)) * 0.5).tolist()
    draws = [draw(i, seed=2, **params) for i in range(60)]
    by_steps = choose(logits, *draws)
    monkeypatch.setattr(sampler, "_WIDTHS", ())
    assert choose(logits, *draws) == by_steps
    assert len(set(by_steps)) > 30


def test_more_ties_than_a_width_holds_are_cut_to_the_lowest_ids():
    """A flat vocabulary: 100 of 3,000 equally likely ids are 0 to 99."""
    flat = [0.0] * 3000
    assert max(choose(flat, *(draw(i, seed=4, top_k=100) for i in range(300)))) <= 99
    assert max(choose(flat, *(draw(i, seed=4, top_p=0.02) for i in range(300)))) <= 60


@pytest.mark.parametrize("vocab_size", [5, 17, 1000, 4099])
def test_neighbours_do_not_matter(vocab_size):
    """A sampled row has the same token alone as in any company."""
    matrix = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    draws = [
        draw(4, seed=42, temperature=0.8),
        draw(0, temperature=0.0),
        draw(7, 1, seed=42, top_k=3),
        draw(9, seed=2**64 - 1, top_p=0.6),
        draw(1, temperature=1e-5, seed=1),
        draw(2, seed=5, top_k=40, top_p=0.9),
        draw(3, temperature=2.0, seed=6),
        draw(3, min_tokens=9, eos_token_ids=frozenset({1, 2}), seed=7),
        draw(5, 0, 3, seed=8),
    ]
    alone = [sample(matrix[i : i + 1].clone(), [d])[0] for i, d in enumerate(draws)]
    assert sample(matrix.clone(), draws) == alone
    assert sample(matrix.flip(0).clone(), draws[::-1]) == alone[::-1]


@given(
    logits=st.lists(st.floats(-30, 30, width=32) | st.just(NEG), min_size=1, max_size=40).filter(
        lambda row: max(row) > NEG
    ),
    temperature=st.sampled_from([1e-5, 0.1, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 39, 10**9]),
    top_p=st.sampled_from([1e-9, 0.5, 0.999999, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=150, deadline=None)
def test_a_draw_is_always_one_of_the_possible_ids(logits, temperature, top_k, top_p, seed):
    (token_id,) = choose(logits, draw(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p))
    weight = math.exp((logits[token_id] - max(logits)) / temperature)
    assert weight > 0
    if top_k:
        assert sum(logit > logits[token_id] for logit in logits) < top_k


def test_tiny_temperature_is_the_greedy_choice():
    """Down to 1e-5, with logits whose quotients overflow fp32, beside ordinary neighbours."""
    logits = [-3e38, 2.0, 3e38, 2.9e38]
    assert (
        choose(logits, draw(temperature=1e-5, seed=1), draw(temperature=1e-5, top_p=0.5)) == [2] * 2
    )
    calm = choose(LOGITS, draw(seed=5))
    assert choose(LOGITS, draw(temperature=1e-5, seed=3), draw(seed=5)) == [5, *calm]


def test_nothing_ends_a_sequence_before_min_tokens():
    """EOS and stop ids are out of reach until `min_tokens` outputs are there."""
    params = {
        "min_tokens": 2, "eos_token_ids": frozenset({5}), "stop_token_ids": frozenset({1}),
    }  # fmt: skip
    greedy = [draw(i, temperature=0.0, **params) for i in range(4)]
    assert choose(LOGITS, *greedy) == [7, 7, 5, 5]
    early = choose(LOGITS, *(draw(1, seed=i, **params) for i in range(300)))
    assert not {1, 5} & set(early)


def test_where_only_barred_ids_are_possible_the_lowest_other_one_is_taken():
    params = {"min_tokens": 1, "eos_token_ids": frozenset({0, 2})}
    logits = [NEG, NEG, 0.0, NEG]
    assert choose(logits, draw(temperature=0.0, **params), draw(seed=1, **params)) == [1, 1]


def test_alternatives_are_reported_before_filters_at_the_temperature():
    """Likeliest first, the chosen one left out, impossible ones never; temperature 1 if greedy."""
    logits = [math.log(0.7), math.log(0.3), NEG, NEG]
    token = sample(torch.tensor([logits]), [draw(runners_up=3, top_k=1)])[0]
    assert token.token_id == 0
    assert token.probability == pytest.approx(0.7)
    assert token.runners_up == ((1, pytest.approx(0.3)),)
    greedy = sample(torch.tensor([LOGITS]), [draw(temperature=0.0, runners_up=2)])[0]
    assert [i for i, _ in greedy.runners_up] == [1, 7]
    assert greedy.probability == pytest.approx(distribution(1.0, 0, 1.0)[5])
    cool = sample(torch.tensor([LOGITS]), [draw(temperature=0.5, top_k=1, runners_up=1)])[0]
    assert cool.probability == pytest.approx(distribution(0.5, 0, 1.0)[5])


def test_equal_alternatives_are_listed_by_id():
    token = sample(torch.zeros(1, 50), [draw(temperature=0.0, runners_up=3)])[0]
    assert (token.token_id, [i for i, _ in token.runners_up]) == (0, [1, 2, 3])


def test_probabilities_are_left_out_where_nobody_asked():
    token = sample(torch.tensor([LOGITS]), [draw(seed=1)])[0]
    assert (token.probability, token.runners_up) == (0.0, ())


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused_by_row(broken):
    matrix = torch.tensor([LOGITS, LOGITS])
    matrix[1, 3] = broken
    with pytest.raises(LogitsError, match=r"rows \[1\] of 2"):
        sample(matrix, [draw(), draw()])


def test_no_global_random_state_is_touched():
    before = torch.random.get_rng_state()
    choose(LOGITS, draw(seed=1), draw(seed=2, top_p=0.5))
    assert torch.equal(before, torch.random.get_rng_state())
