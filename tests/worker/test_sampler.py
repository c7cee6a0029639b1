"""Tokens are chosen by address: right frequencies, and nothing but the address matters."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker import drawing
from worker.sampler import sample
from worker.sequence import Draw, LogitBias, SamplingParams
from worker.token_counts import TokenCounts

NEG = -math.inf
LOGITS = [0.3, 2.0, -1.0, 1.1, 0.0, 2.4, -3.0, 1.9, 0.7, -0.2]


def draw(index=0, choice=0, runners_up=0, history=None, **params):
    """`history` is (prompt ids, output ids), for penalties."""
    counts = None if history is None else TokenCounts(*history)
    return Draw(SamplingParams(**params), index, choice, runners_up, counts)


def choose(logits, *draws):
    """Ids chosen for the draws, each from its own copy of the same logits."""
    matrix = torch.tensor(logits).repeat(len(draws), 1)
    return [token.token_id for token in sample(matrix, draws)]


def adjusted(logits, history=((), ()), **params):
    """Logits after bias and penalties by definition, in float64."""
    prompt, output = history
    bias = params.get("logit_bias", {})
    repetition = params.get("repetition_penalty", 1.0)
    values = []
    for i, logit in enumerate(logits):
        value = logit + bias.get(i, 0.0)
        if i in {*prompt, *output}:
            value = value / repetition if value > 0 else value * repetition
        value -= params.get("frequency_penalty", 0.0) * output.count(i)
        value -= params.get("presence_penalty", 0.0) * (i in output)
        values.append(value)
    return values


def distribution(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logits=LOGITS, **_):
    """The probabilities by definition, in float64, for logits without ties."""
    weights = {i: math.exp((logit - max(logits)) / temperature) for i, logit in enumerate(logits)}
    likeliest = sorted(weights, key=weights.get, reverse=True)[: top_k or len(logits)]
    mass, total, kept = 0.0, sum(weights[i] for i in likeliest), []
    for i in likeliest:
        kept.append(i)
        mass += weights[i]
        if mass >= top_p * total:
            break
    kept = [i for i in kept if weights[i] >= min_p]
    return {i: weights[i] / sum(weights[j] for j in kept) for i in kept}


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
        {"min_p": 0.5},
        {"min_p": 0.5, "top_k": 4},
        {"min_p": 0.01, "top_p": 0.74},
    ],
)
def test_filters_that_leave_the_same_candidates_draw_the_same(same):
    """Three candidates are left by each; the draws equal those of a masked vocabulary."""
    kept = sorted(range(len(LOGITS)), key=lambda i: -LOGITS[i])[:3]
    masked = [logit if i in kept else NEG for i, logit in enumerate(LOGITS)]
    assert set(distribution(**same)) == set(kept)
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
    monkeypatch.setattr(drawing, "_WIDTHS", ())
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
    matrix = torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
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
        draw(6, seed=9, min_p=0.2, history=([1], [2, 2, 3]), frequency_penalty=0.5),
        draw(6, temperature=0.0, history=([1, 4], [2]), repetition_penalty=2.0),
        draw(7, seed=10, logit_bias=LogitBias({3: 5.0, 1: -100.0}), logprobs=3),
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
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_p": 0.5, "logprobs": 2}])
def test_logits_that_are_no_numbers_cost_their_own_row_alone(broken, sampling):
    matrix = torch.tensor([LOGITS, LOGITS, LOGITS])
    healthy = sample(matrix.clone(), [draw(i, seed=5, **sampling) for i in range(3)])
    matrix[1, 3] = broken
    penalised = draw(1, seed=5, history=([3], [3]), repetition_penalty=0.5, **sampling)
    first, faulty, last = sample(
        matrix, [draw(0, seed=5, **sampling), penalised, draw(2, seed=5, **sampling)]
    )
    assert faulty is None
    assert [first, last] == [healthy[0], healthy[2]]


def test_presence_and_frequency_count_the_output_and_repetition_the_prompt_too():
    """Greedy between two ids: 1 leads by 0.5, and gives way where it is counted."""
    logits = [2.0, 2.5, NEG]
    prompt_only, output_only = ([1, 1], []), ([], [1])
    for name in ("presence_penalty", "frequency_penalty"):
        sequence_counts = [
            (history[1] and [], history[1]) for history in (prompt_only, output_only)
        ]
        chosen = [
            choose(logits, draw(temperature=0.0, history=history, **{name: 1.0}))
            for history in sequence_counts
        ]
        assert chosen == [[1], [0]]
    for history in (prompt_only, output_only):
        greedy = draw(temperature=0.0, history=history, repetition_penalty=1.5)
        assert choose(logits, greedy) == [0]


def test_a_frequency_penalty_grows_with_each_occurrence_and_a_presence_penalty_does_not():
    logits = [0.0, 2.5]
    often = ([], [1, 1, 1])
    assert choose(logits, draw(temperature=0.0, history=often, frequency_penalty=1.0)) == [0]
    assert choose(logits, draw(temperature=0.0, history=often, presence_penalty=1.0)) == [1]


def test_a_quotient_beyond_fp32_is_the_likeliest_and_no_fault():
    greedy = draw(temperature=0.0, history=([0], []), repetition_penalty=1e-38)
    assert choose([9.0, 10.0], greedy) == [0]


def test_a_bias_of_100_forces_an_id_and_one_of_minus_100_bars_it():
    forced = LogitBias({6: 100.0})
    assert set(choose(LOGITS, *(draw(i, seed=i, logit_bias=forced) for i in range(100)))) == {6}
    barred = LogitBias({i: -100.0 for i in range(10) if i != 2})
    assert set(choose(LOGITS, *(draw(i, seed=i, logit_bias=barred) for i in range(100)))) == {2}


def test_min_p_of_1_keeps_the_likeliest_alone_and_all_that_equal_it():
    assert set(choose(LOGITS, *(draw(i, seed=1, min_p=1.0) for i in range(50)))) == {5}
    tied = [1.0, 3.0, 3.0, 0.0]
    assert set(choose(tied, *(draw(i, seed=1, min_p=1.0) for i in range(50)))) == {1, 2}


def test_log_probabilities_come_after_penalties_and_before_temperature_and_filters():
    params = {"logit_bias": {4: 1.0}, "presence_penalty": 0.5}
    values = adjusted(LOGITS, ([], [1]), **params)
    total = math.log(sum(map(math.exp, values)))
    asked = draw(
        history=([], [1]), temperature=0.3, top_k=1, presence_penalty=0.5,
        logit_bias=LogitBias({4: 1.0}), logprobs=3,
    )  # fmt: skip
    token = sample(torch.tensor([LOGITS]), [asked])[0]
    order = sorted(range(10), key=lambda i: -values[i])
    assert token.token_id == order[0]
    assert token.logprob == pytest.approx(values[order[0]] - total, abs=1e-5)
    assert [i for i, _ in token.alternatives] == order[1:4]
    expected = [values[i] - total for i in order[1:4]]
    assert [share for _, share in token.alternatives] == pytest.approx(expected, abs=1e-5)


def test_logprobs_0_tells_the_chosen_id_alone_and_absent_tells_nothing():
    told = sample(torch.tensor([LOGITS]), [draw(temperature=0.0, logprobs=0)])[0]
    assert (told.alternatives, told.logprob < 0) == ((), True)
    silent = sample(torch.tensor([LOGITS]), [draw(temperature=0.0)])[0]
    assert (silent.alternatives, silent.logprob) == ((), 0.0)


def test_no_more_alternatives_than_possible_ids_and_no_impossible_one():
    token = sample(torch.tensor([[0.0, NEG, 1.0]]), [draw(temperature=0.0, logprobs=20)])[0]
    assert [i for i, _ in token.alternatives] == [0]


def test_alternatives_are_alike_for_ties_beyond_those_asked_for():
    flat = sample(torch.zeros(2, 500), [draw(temperature=0.0, logprobs=3), draw(seed=4)])[0]
    assert [i for i, _ in flat.alternatives] == [1, 2, 3]


def test_no_global_random_state_is_touched():
    before = torch.random.get_rng_state()
    choose(LOGITS, draw(seed=1), draw(seed=2, top_p=0.5))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1, "temperature": 2.0}],
    ids=str,
)
def test_where_nothing_is_possible_the_lowest_id_is_taken(params):
    """Every logit is -infinity, or a bias has made them so unlikely that none is above it."""
    neighbour = choose(LOGITS, draw(seed=3))[0]
    rows = torch.tensor([[NEG] * 10, LOGITS])
    hopeless, beside = sample(rows, [draw(seed=1, logprobs=2, **params), draw(seed=3)])
    assert (hopeless.token_id, hopeless.logprob, hopeless.alternatives) == (0, NEG, ())
    assert beside.token_id == neighbour
    barred = LogitBias(dict.fromkeys(range(10), -100.0))
    same = choose([-3e38] * 10, *(draw(i, seed=1, logit_bias=barred, **params) for i in range(9)))
    assert same == choose([0.0] * 10, *(draw(i, seed=1, **params) for i in range(9)))


def test_the_lowest_temperature_that_is_not_greedy_draws_between_equal_ids():
    tied = [1.0, 5.0, 5.0, 4.999]
    assert set(choose(tied, *(draw(i, seed=2, temperature=1e-5) for i in range(60)))) == {1, 2}
    below = math.nextafter(float(torch.tensor(1e-5)), 0)
    assert set(choose(tied, *(draw(i, seed=2, temperature=below) for i in range(60)))) == {1}
