"""A submit is checked before anything is held, and every refusal names field and numbers."""

import math

import pytest

from noria.v1 import common_pb2, worker_pb2
from worker.sampling_checks import InvalidSubmitError, ModelLimits
from worker.scheduled import SequenceUpdate
from worker.sequence import SampledToken, ScheduledSequence
from worker.translate import Origin, StepFacts, sequence_from, step_record

LIMITS = ModelLimits(vocab_size=100, max_model_len=50, eos_token_ids=frozenset({2}))


def submit(**fields):
    defaults = {"id": "r/1", "submit_number": 1, "prompt_token_ids": [1, 2, 3], "max_tokens": 5}
    return worker_pb2.Submit(**{**defaults, **fields})


def sampling(**fields):
    return submit(sampling=common_pb2.SamplingParams(**fields))


def translate(message):
    return sequence_from(message, LIMITS, sequence_id=7, now=100.0)


def test_defaults_are_those_of_the_wire():
    sequence = translate(submit())
    assert sequence.sampling.temperature == 1.0
    assert sequence.sampling.top_p == 1.0
    assert sequence.sampling.top_k == 0
    assert sequence.sampling.eos_token_ids == {2}
    assert sequence.deadline is None
    assert sequence.output_token_ids == []


@pytest.mark.parametrize(("temperature", "greedy"), [(1e-5, False), (9.9999e-6, True), (0, True)])
def test_greedy_is_below_a_temperature_of_1e_5_as_the_wire_carries_it(temperature, greedy):
    """SMP-03."""
    assert translate(sampling(temperature=temperature)).sampling.is_greedy is greedy


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_a_seed_is_any_64_bits(seed):
    assert translate(sampling(seed=seed)).sampling.seed == seed % 2**64


def test_everything_given_arrives():
    message = submit(
        outputs=[worker_pb2.OutputTokens(ids=[9, 8])],
        priority=3,
        deadline_ms=1500,
        trace_steps=True,
        sampling=common_pb2.SamplingParams(
            temperature=0.5, top_p=0.9, top_k=4, seed=-1, min_tokens=2,
            stop_token_ids=[5], ignore_eos=True,
        ),
    )  # fmt: skip
    sequence = translate(message)
    assert sequence.output_token_ids == [9, 8]
    assert sequence.prompt_token_ids == [1, 2, 3]
    assert sequence.deadline == 101.5
    assert sequence.priority == 3
    assert sequence.trace_steps
    chosen = sequence.sampling
    assert chosen.seed == 2**64 - 1
    assert (chosen.top_k, chosen.min_tokens) == (4, 2)
    assert chosen.eos_token_ids == frozenset()
    assert chosen.stop_token_ids == {5}


@pytest.mark.parametrize(
    ("message", "field", "says"),
    [
        (submit(prompt_token_ids=[]), "prompt_token_ids", "0 ids given"),
        (submit(prompt_token_ids=[1, 100]), "prompt_token_ids", "an id is outside .* of 100 ids"),
        (submit(prompt_token_ids=[2**32 - 1]), "prompt_token_ids", "outside"),
        (submit(outputs=[worker_pb2.OutputTokens(ids=[100])]), "outputs", "an id is outside"),
        (submit(outputs=[worker_pb2.OutputTokens(ids=[1] * 6)]), "outputs",
         "6 ids are more than max_tokens 5"),
        (sampling(min_tokens=6), "sampling.min_tokens", "6 is above max_tokens 5"),
        (submit(outputs=[worker_pb2.OutputTokens()] * 2), "outputs", "2 given for n = 1"),
        (submit(outputs=[worker_pb2.OutputTokens()], n=2), "outputs", "1 given for n = 2"),
        (submit(max_tokens=0), "max_tokens", "0 is below 1"),
        (submit(max_tokens=48), "max_tokens", "3 prompt tokens and max_tokens 48 exceed .* 50"),
        (submit(max_tokens=2**32 - 1), "max_tokens", "4294967295"),
        (submit(n=0), "n", "0 choices; at least 1, at most 16"),
        (submit(n=17), "n", "17 choices; at least 1, at most 16"),
        (sampling(temperature=-0.1), "sampling.temperature", "-0.1 is outside"),
        (sampling(temperature=2.1), "sampling.temperature", "2.1 is outside"),
        (sampling(temperature=math.nan), "sampling.temperature", "nan"),
        (sampling(temperature=math.inf), "sampling.temperature", "inf"),
        (sampling(top_p=0.0), "sampling.top_p", r"0 is outside \(0, 1\]"),
        (sampling(top_p=1.01), "sampling.top_p", "1.01"),
        (sampling(stop_token_ids=[100]), "sampling.stop_token_ids", "an id is outside"),
        (sampling(stop_token_ids=range(65)), "sampling.stop_token_ids", "65 ids given, at most 64"),
        (sampling(min_p=-0.1), "sampling.min_p", r"-0.1 is outside \[0, 1\]"),
        (sampling(min_p=1.1), "sampling.min_p", "1.1"),
        (sampling(presence_penalty=2.1), "sampling.presence_penalty", r"2.1 is outside \[-2, 2\]"),
        (sampling(frequency_penalty=-2.1), "sampling.frequency_penalty", "-2.1"),
        (sampling(frequency_penalty=math.nan), "sampling.frequency_penalty", "nan"),
        (sampling(repetition_penalty=0.0), "sampling.repetition_penalty", r"outside \(0, 2\]"),
        (sampling(repetition_penalty=2.5), "sampling.repetition_penalty", "2.5"),
        (sampling(logit_bias={100: 1.0}), "sampling.logit_bias", "an id is outside .* of 100 ids"),
        (sampling(logit_bias={2**32 - 1: 1.0}), "sampling.logit_bias", "an id is outside"),
        (sampling(logit_bias={3: 101}), "sampling.logit_bias", r"101 is outside \[-100, 100\]"),
        (sampling(logit_bias={3: -101}), "sampling.logit_bias", "-101"),
        (sampling(logit_bias={3: math.inf}), "sampling.logit_bias", "inf"),
        (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias",
         "1025 entries given, at most 1024"),
        (sampling(logprobs=21), "sampling.logprobs", "21 alternatives given, at most 20"),
        (sampling(prompt_logprobs=21), "sampling.prompt_logprobs",
         "21 alternatives given, at most 20"),
    ],
)  # fmt: skip
def test_a_bad_submit_is_refused_by_field(message, field, says):
    with pytest.raises(InvalidSubmitError, match=says) as caught:
        translate(message)
    assert caught.value.field == field


def test_further_choices_follow_the_first_with_ids_of_their_own():
    outputs = [worker_pb2.OutputTokens(ids=ids) for ids in ([9], [8, 7], [])]
    first = translate(submit(n=3, outputs=outputs, priority=2, cache_salt=b"salt"))
    choices = [first, *first.siblings]
    assert [c.sequence_id for c in choices] == [c.order for c in choices] == [7, 8, 9]
    assert [c.choice for c in choices] == [0, 1, 2]
    assert [c.output_token_ids for c in choices] == [[9], [8, 7], []]
    assert {c.cache_salt for c in choices} == {b"salt"}
    assert [len(c.siblings) for c in choices] == [2, 0, 0]


def test_all_sampling_controls_arrive():
    chosen = translate(
        sampling(
            min_p=0.25, presence_penalty=0.5, frequency_penalty=-2, repetition_penalty=1.5,
            logit_bias={3: 1.5, 99: -100}, logprobs=0,
        )
    ).sampling  # fmt: skip
    assert (chosen.min_p, chosen.presence_penalty, chosen.frequency_penalty) == (0.25, 0.5, -2)
    assert (chosen.repetition_penalty, chosen.logprobs) == (1.5, 0)
    bias = dict(zip(chosen.logit_bias.ids, chosen.logit_bias.values, strict=True))
    assert bias == {3: 1.5, 99: -100}


def test_penalties_count_what_came_before_on_another_worker():
    message = submit(
        outputs=[worker_pb2.OutputTokens(ids=[9, 3, 9])],
        sampling=common_pb2.SamplingParams(repetition_penalty=1.2),
    )
    counts = translate(message).token_counts
    told = dict(zip(counts.ids.tolist(), counts.output_counts.tolist(), strict=True))
    assert told == {1: 0, 2: 0, 3: 1, 9: 2}


@pytest.mark.parametrize(
    ("controls", "counted"),
    [
        ({"presence_penalty": 1.0}, {2: 1, 9: 2}),
        ({"frequency_penalty": 1.0}, {2: 1, 9: 2}),
        ({"repetition_penalty": 2.0}, {1: 0, 2: 1, 3: 0, 9: 2}),
        ({"repetition_penalty": 2.0, "presence_penalty": 1.0}, {1: 0, 2: 1, 3: 0, 9: 2}),
        ({"logit_bias": {3: 1.0}}, None),
    ],
)
def test_which_ids_a_penalty_counts(controls, counted):
    """SMP-05: the prompt's for repetition alone; the output's always, a passed EOS included."""
    message = submit(
        outputs=[worker_pb2.OutputTokens(ids=[9, 2])],
        sampling=common_pb2.SamplingParams(ignore_eos=True, **controls),
    )
    sequence = translate(message)
    sequence.append(9)
    counts = sequence.token_counts
    assert (counts is None) == (counted is None)
    if counts is not None:
        told = zip(counts.ids.tolist(), counts.output_counts.tolist(), strict=True)
        assert dict(told) == counted


def test_values_that_ask_for_nothing_pass():
    neutral = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    sequence = translate(sampling(**neutral, repetition_penalty=1.0))
    assert sequence.sampling.temperature == 1.0
    assert (sequence.token_counts, sequence.sampling.logit_bias) == (None, None)


def test_a_step_record_says_each_ids_bytes_and_nothing_for_ids_beyond_the_vocabulary():
    scheduled = ScheduledSequence(7, [1, 2, 3], 0, [1], None)
    token = SampledToken(1, 0.6, ((2, 0.3), (99, 0.1)))
    update = SequenceUpdate(translate(submit()), scheduled, token, kv_tokens=3, kv_blocks=1)
    facts = StepFacts(1, 1, 3, 500, Origin(8, "triton", True))
    record = step_record(update, facts, [b"", b"\xeb", b" no"])
    assert (record.hidden_size, record.attention_backend, record.row_exact) == (8, "triton", True)
    assert (record.token_id, record.token_bytes) == (1, b"\xeb")
    assert [(other.id, other.bytes) for other in record.runners_up] == [(2, b" no"), (99, b"")]
