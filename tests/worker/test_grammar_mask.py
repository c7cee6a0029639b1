"""Masks touch the rows that have a grammar, and no other; the order of controls is kept."""

import torch

from tests.support.grammars import CONTROL, EOS, TABLE, compile_source, regex
from worker.sampler import sample
from worker.sequence import Draw, LogitBias, SamplingParams

A, B, C = map(ord, "abc")
GREEDY = SamplingParams(temperature=0.0, eos_token_ids=frozenset({EOS}))


def rows(count):
    return torch.randn(count, TABLE.size, generator=torch.Generator().manual_seed(1))


def draw(pattern=None, output=(), sampling=GREEDY):
    matcher = compile_source(regex(pattern)).matcher(output) if pattern else None
    return Draw(sampling, len(output), matcher=matcher)


def chosen(logits, *draws):
    return [token and token.token_id for token in sample(logits, list(draws))]


def test_rows_without_a_grammar_keep_their_bits():
    logits, alone = rows(5), rows(5)
    draws = [draw(), draw("a|b"), draw(), draw("[0-9]"), draw()]
    ids = chosen(logits, *draws)
    assert torch.equal(logits[[0, 2, 4]], alone[[0, 2, 4]])
    assert [ids[0], ids[2], ids[4]] == alone[[0, 2, 4]].argmax(dim=1).tolist()
    assert ids[1] == max((A, B), key=lambda i: alone[1, i])
    assert ids[3] in range(ord("0"), ord("9") + 1)
    assert int((logits[1] > -torch.inf).sum()) == 2


def test_a_bias_cannot_lift_what_is_not_allowed():
    biased = SamplingParams(
        temperature=0.0, logit_bias=LogitBias({C: 100.0, CONTROL: 100.0, B: 5.0}), logprobs=3
    )
    (token,) = sample(torch.zeros(1, TABLE.size), [draw("a|b", sampling=biased)])
    assert token.token_id == B
    assert [other for other, _ in token.alternatives] == [A]


def test_log_probabilities_are_those_of_what_is_allowed():
    sampling = SamplingParams(temperature=0.0, logprobs=2)
    (token,) = sample(rows(1), [draw("a", sampling=sampling)])
    assert (token.token_id, token.logprob, token.alternatives) == (A, 0.0, ())


def test_min_tokens_keeps_an_output_going_as_long_as_its_grammar_can():
    eager = SamplingParams(
        temperature=0.0, min_tokens=5, eos_token_ids=frozenset({EOS}),
        stop_token_ids=frozenset({B}), logit_bias=LogitBias({EOS: 70.0, B: 60.0}),
    )  # fmt: skip
    assert chosen(torch.zeros(1, TABLE.size), draw("a[bc]*", [A], eager)) == [C]
    assert chosen(torch.zeros(1, TABLE.size), draw("ab", [A], eager)) == [B]
    assert chosen(torch.zeros(1, TABLE.size), draw("ab", [A, B], eager)) == [EOS]
    # Both that are left would end it: the likelier one.
    assert chosen(torch.zeros(1, TABLE.size), draw("ab?", [A], eager)) == [EOS]
    assert chosen(torch.zeros(1, TABLE.size), draw("a[bc]*", [A] * 1 + [C] * 4, eager)) == [EOS]


def test_where_the_model_holds_all_of_it_impossible_the_lowest_id_is_chosen():
    logits = torch.full((2, TABLE.size), -torch.inf)
    sampled = SamplingParams(seed=3, eos_token_ids=frozenset({EOS}))
    assert chosen(logits, draw("c|b"), draw("[b-z]+", [C], sampled)) == [B, B]


def test_a_row_whose_grammar_has_a_problem_is_not_drawn():
    ids = chosen(rows(3), draw("a"), draw("ab", [C]), draw())
    assert ids[0] == A
    assert ids[1] is None
    assert ids[2] is not None


def test_filters_see_what_the_grammar_left():
    """The likeliest id of all is not allowed; top_k = 1 still finds the likeliest that is."""
    logits = torch.zeros(1, TABLE.size)
    logits[0, C], logits[0, B] = 9.0, 1.0
    one = SamplingParams(top_k=1, seed=5)
    assert chosen(logits, draw("[ab]", sampling=one)) == [B]


def test_logits_that_are_no_numbers_fail_a_row_wherever_they_stand():
    """Also at ids that its grammar would not have allowed."""
    logits = torch.zeros(3, TABLE.size)
    logits[0, C], logits[1, C], logits[2, C] = torch.nan, torch.inf, -torch.inf
    ids = chosen(logits, draw("a"), draw("a"), draw("a"))
    assert ids == [None, None, A]
