"""Draws have the distribution that their controls define, whichever part of the address varies.

Chi-square against exact probabilities in float64. Seeds are fixed, so each of these either
always passes or always fails; a correct sampler passes a set of seeds with a probability of
more than 1 - 1e-4, all tests together.
"""

import math
from collections import Counter

import pytest
import torch

from worker.block_pool import BlockPool
from worker.engine import Engine
from worker.kv_cache import allocate_kv_cache
from worker.model_runner import ModelRunner
from worker.sampler import sample
from worker.scheduler import Scheduler
from worker.scripted import Script, ScriptedCache, ScriptedModel, ScriptSet
from worker.sequence import Draw, LogitBias, SamplingParams, Sequence
from worker.token_counts import TokenCounts

LOGITS = [0.3, 2.0, -1.0, 1.1, 0.0, 2.4, -3.0, 1.9, 0.7, -0.2]
PROMPT, OUTPUT = [5, 5, 2], [1, 1, 7, 3]
ENDS = {"eos_token_ids": frozenset({5}), "stop_token_ids": frozenset({1, 9})}
NUM_DRAWS = 8_000
# Of one test; some 50 are made.
LEAST_P = 1e-6


def probabilities(logits, output_index, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0,
                  logit_bias=None, repetition_penalty=1.0, frequency_penalty=0.0,
                  presence_penalty=0.0, min_tokens=0, eos_token_ids=(), stop_token_ids=(),
                  prompt=PROMPT, output=OUTPUT):  # fmt: skip
    """By definition, for logits without ties."""
    values = {}
    for i, logit in enumerate(logits):
        value = logit + (logit_bias or {}).get(i, 0.0)
        if i in {*prompt, *output}:
            value = value / repetition_penalty if value > 0 else value * repetition_penalty
        value -= frequency_penalty * output.count(i) + presence_penalty * (i in output)
        if output_index >= min_tokens or i not in {*eos_token_ids, *stop_token_ids}:
            values[i] = value
    top = max(values.values())
    weights = {i: math.exp((value - top) / temperature) for i, value in values.items()}
    likeliest = sorted(weights, key=weights.get, reverse=True)[: top_k or len(weights)]
    total, mass, kept = sum(weights[i] for i in likeliest), 0.0, []
    for i in likeliest:
        kept.append(i)
        mass += weights[i]
        if mass >= top_p * total:
            break
    kept = [i for i in kept if weights[i] >= min_p]
    return {i: weights[i] / sum(weights[j] for j in kept) for i in kept}


def assert_drawn_from(expected, drawn):
    """No impossible id, and frequencies as likely as they should be."""
    counts, total = Counter(drawn), len(drawn)
    assert counts.keys() <= expected.keys()
    # Ids too rare for the chi-square are counted as one.
    rare = {i for i, p in expected.items() if p * total < 5}
    cells = [(p * total, counts[i]) for i, p in expected.items() if i not in rare]
    if rare:
        cells.append((sum(expected[i] for i in rare) * total, sum(counts[i] for i in rare)))
    statistic = sum((seen - wanted) ** 2 / wanted for wanted, seen in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    if freedom:
        p_value = torch.special.gammaincc(freedom, torch.tensor(statistic / 2).double())
        assert p_value > LEAST_P


def by_index(n):
    return [(17, at, 0) for at in range(n)]


def by_seed(n):
    return [(seed % 2**64, 9, 0) for seed in range(-n // 2, n - n // 2)]


def by_choice(n):
    return [(2**63 - 1, 9, at) for at in range(n)]


ADDRESSES = {"index": by_index, "seed": by_seed, "choice": by_choice}
CONTROLS = [
    {},
    {"temperature": 0.4},
    {"temperature": 2.0},
    {"top_k": 4},
    {"top_k": 10},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"min_p": 0.15},
    {"min_p": 0.9},
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"repetition_penalty": 2.0},
    {"repetition_penalty": 0.5},
    {"logit_bias": {0: 2.0, 5: -3.0, 6: 4.5}},
    {"logit_bias": {0: 100.0, 8: 100.0, 5: -100.0}},
    {"min_tokens": 10**6, **ENDS},
    {"min_tokens": 1, **ENDS},
]
COMBINATIONS = [
    {"temperature": 0.9, "top_k": 5, "top_p": 0.8},
    {"temperature": 1.4, "top_k": 7, "top_p": 0.95, "min_p": 0.1},
    {"top_p": 0.7, "min_p": 0.4},
    {"frequency_penalty": 0.4, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"min_tokens": 10**6, "top_k": 3, "temperature": 1.5, **ENDS},
    {"min_tokens": 10**6, "top_p": 0.6, "logit_bias": {5: 100.0, 4: 1.0}, **ENDS},
    {"repetition_penalty": 1.8, "top_p": 0.85, "temperature": 0.7},
    {
        "temperature": 0.8, "top_k": 8, "top_p": 0.9, "min_p": 0.02, "logit_bias": {3: 1.5},
        "frequency_penalty": 0.2, "presence_penalty": 0.1, "repetition_penalty": 1.1,
        "min_tokens": 10**6, "stop_token_ids": frozenset({7}),
    },
]  # fmt: skip


def drawn(controls, addresses):
    """Ids drawn at (seed, output index, choice), as the engine would ask for them."""
    bias = controls.get("logit_bias")
    given = controls | ({"logit_bias": LogitBias(bias)} if bias else {})
    params = {seed: SamplingParams(seed=seed, **given) for seed in {s for s, *_ in addresses}}
    one = next(iter(params.values()))
    counted = PROMPT if one.counts_prompt else []
    counts = TokenCounts(counted, OUTPUT) if one.counts_output else None
    draws = [Draw(params[seed], at, choice, token_counts=counts) for seed, at, choice in addresses]
    logits = torch.tensor(LOGITS).repeat(len(draws), 1)
    return [token.token_id for token in sample(logits, draws)]


def name(controls):
    return "+".join(f"{key}={value}" for key, value in controls.items() if "ids" not in key)


@pytest.mark.parametrize("controls", CONTROLS, ids=name)
def test_each_control_alone(controls):
    """SMP-04: limits included. The first output index is 0, where min_tokens 1 counts."""
    addresses = by_index(NUM_DRAWS)
    early = controls.get("min_tokens") == 1
    if early:
        (first,) = drawn(controls, addresses[:1])
        assert first not in {5, 1, 9}
        addresses = addresses[1:]
    assert_drawn_from(probabilities(LOGITS, int(early), **controls), drawn(controls, addresses))


@pytest.mark.parametrize("vary", ADDRESSES)
@pytest.mark.parametrize("controls", COMBINATIONS, ids=name)
def test_combinations_whichever_part_of_the_address_varies(controls, vary):
    addresses = ADDRESSES[vary](NUM_DRAWS // 2)
    assert_drawn_from(probabilities(LOGITS, 9, **controls), drawn(controls, addresses))


def test_two_draws_of_one_seed_are_independent():
    """Pairs of neighbouring indices and of neighbouring choices, over 64 cells each."""
    expected = probabilities([0.0, 0.5, 1.0, 1.5], 0)
    logits = torch.tensor([0.0, 0.5, 1.0, 1.5]).repeat(3 * NUM_DRAWS, 1)
    addresses = [(at, 0, 0) for at in range(NUM_DRAWS)]
    addresses += [(at, 1, 0) for at in range(NUM_DRAWS)] + [(at, 0, 1) for at in range(NUM_DRAWS)]
    draws = [Draw(SamplingParams(seed=seed), index, choice) for seed, index, choice in addresses]
    ids = [token.token_id for token in sample(logits, draws)]
    first, later, other = (ids[at : at + NUM_DRAWS] for at in range(0, len(ids), NUM_DRAWS))
    pairs = {(i, j): expected[i] * expected[j] for i in expected for j in expected}
    assert_drawn_from(pairs, list(zip(first, later, strict=True)))
    assert_drawn_from(pairs, list(zip(first, other, strict=True)))


@pytest.mark.parametrize(
    "controls",
    [
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 3, "repetition_penalty": 1.5, "logit_bias": {4: 3.0}},
    ],
    ids=name,
)
def test_through_the_engine_over_a_scripted_model(controls):
    """The first token of 200 requests with 16 choices each; penalties count the prompt."""
    prompt, logits = [5, 2, 5], dict(enumerate(LOGITS))
    cache = ScriptedCache()
    model = ScriptedModel(ScriptSet((Script(tuple(prompt), (0,), {0: logits}),)), 12, 11)
    allocate_kv_cache(cache, model.kv_spec, 65, 4)
    scheduler = Scheduler(
        BlockPool(64, 4), max_num_seqs=32, max_num_batched_tokens=64, max_model_len=16
    )
    engine = Engine(scheduler, ModelRunner(model, cache, 4), look_ahead=10_000)
    bias = controls.get("logit_bias")
    params = controls | ({"logit_bias": LogitBias(bias)} if bias else {})
    requests = []
    for first in range(0, 3200, 16):
        sampling = SamplingParams(seed=first, **params)
        choices = [Sequence(first + i, prompt, sampling, 1, first + i, choice=i) for i in range(16)]
        choices[0].siblings = choices[1:]
        engine.submit(choices[0], 0.0)
        requests += choices
    while engine.has_work:
        engine.step()
    expected = probabilities(LOGITS, 0, prompt=prompt, output=[], **controls)
    assert_drawn_from(expected, [sequence.output_token_ids[0] for sequence in requests])
