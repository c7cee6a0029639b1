"""A stream with a grammar follows from its request alone, and its neighbours from theirs."""

import json

import pytest
import torch

from tests.support.grammars import (
    EOS,
    PIECES,
    TABLE,
    HeldTicket,
    json_schema,
    matchers,
    regex,
)
from worker.block_pool import BlockPool
from worker.engine import Engine
from worker.kv_cache import allocate_kv_cache
from worker.model_runner import ModelRunner
from worker.scheduler import Scheduler
from worker.scripted import ScriptedCache, ScriptedModel, ScriptSet
from worker.sequence import FinishReason, LogitBias, SamplingParams, Sequence

BLOCK_SIZE = 4
SCHEMA = json_schema(
    '{"type":"object","properties":{"a":{"type":"array","items":{"type":"integer","maximum":99,'
    '"minimum":-9},"maxItems":3},"b":{"enum":["x","yz",null]},"c":{"type":"string","maxLength":6}},'
    '"required":["a","b"],"additionalProperties":false}'
)
CONTROLLED = SamplingParams(
    temperature=0.9, top_p=0.95, top_k=40, min_p=0.001, seed=2026, min_tokens=9,
    presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.1,
    logit_bias=LogitBias({ord('"'): 1.5, ord(" "): -3.0}), logprobs=3,
    eos_token_ids=frozenset({EOS}), stop_token_ids=frozenset({ord("~")}), grammar=SCHEMA,
)  # fmt: skip
FREE = SamplingParams(seed=4, eos_token_ids=frozenset({EOS}))


class NoisyModel(ScriptedModel):
    """All ids are likely, each history's in its own order."""

    def logits(self, hidden):
        def row(state):
            noise = torch.Generator().manual_seed(state)
            return torch.randn(self.vocab_size, generator=noise) * 2

        return torch.stack([row(state) for state in hidden[:, 0].tolist()])


class Inline:
    """Compiles at once."""

    def request(self, source, count, salt):
        ticket = HeldTicket(source, count)
        ticket.outcome = matchers(source, count)
        return ticket


class Worker:
    def __init__(self, *, num_blocks=200, budget=64, preempting=False):
        cache, model = ScriptedCache(), NoisyModel(ScriptSet(), TABLE.size, EOS)
        allocate_kv_cache(cache, model.kv_spec, num_blocks + 1, BLOCK_SIZE)
        self.scheduler = Scheduler(
            BlockPool(num_blocks, BLOCK_SIZE),
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_model_len=200,
        )
        self.preempting = preempting
        runner = ModelRunner(model, cache, BLOCK_SIZE)
        self.engine = Engine(self.scheduler, runner, look_ahead=100, compiler=Inline())

    def run(self, *sequences):
        for sequence in sequences:
            self.engine.submit(sequence, 0.0)
        ended = {}
        for _ in range(2_000):
            for entry in self.engine.step().ended:
                ended[entry.sequence.sequence_id] = entry
            self.scheduler.check_integrity()
            if self.preempting:
                for running in list(self.scheduler._running):
                    self.scheduler._preempt(running)
            if len(ended) == sum(1 + len(sequence.siblings) for sequence in sequences):
                break
        assert self.scheduler.pool.num_used == 0
        return ended


def sequence(number, params=CONTROLLED, *, max_tokens=80, **fields):
    prompt = [30 + (number * 3 + at) % 8 for at in range(11)]
    return Sequence(number, prompt, params, max_tokens, order=number, **fields)


def text_of(output):
    assert output[-1] == EOS
    return b"".join(PIECES[token_id] for token_id in output[:-1]).decode()


@pytest.fixture(scope="module")
def alone():
    (entry,) = Worker().run(sequence(1)).values()
    assert entry.sequence.finish_reason is FinishReason.EOS
    return entry.sequence.output_token_ids


def test_an_output_that_ends_by_itself_is_complete(alone):
    answer = json.loads(text_of(alone))
    assert answer.keys() <= {"a", "b", "c"}
    assert answer["b"] in ("x", "yz", None)


@pytest.mark.parametrize(
    "circumstances",
    [{}, {"budget": 8}, {"preempting": True}, {"num_blocks": 24, "budget": 8}],
    ids=["company", "chunks", "preempted at every step", "few blocks"],
)
def test_circumstances_change_no_stream_with_a_grammar(circumstances, alone):
    others = [sequence(2), sequence(3, FREE), sequence(4, FREE)]
    ended = Worker(**circumstances).run(*others, sequence(1))
    assert ended[1].sequence.output_token_ids == alone
    preempted = sum(entry.sequence.num_preemptions for entry in ended.values())
    assert (preempted > 0) == (circumstances not in ({}, {"budget": 8}))


def test_for_every_k_a_second_worker_goes_on_as_the_first_would_have(alone):
    for preempting in (False, True):
        for k in range(len(alone) + 1):
            given = sequence(1, output_token_ids=alone[:k], num_given_tokens=k)
            (entry,) = Worker(preempting=preempting and k % 5 == 0).run(given).values()
            assert entry.sequence.output_token_ids == alone
            assert entry.sequence.finish_reason is FinishReason.EOS


def test_sixteen_neighbours_are_what_they_are_alone():
    neighbours = [sequence(10 + i, FREE, max_tokens=20) for i in range(16)]
    expected = Worker().run(*neighbours)
    company = [sequence(40 + i) for i in range(4)]
    again = [sequence(10 + i, FREE, max_tokens=20) for i in range(16)]
    ended = Worker().run(*company, *again)
    for number, entry in expected.items():
        assert ended[number].sequence.output_token_ids == entry.sequence.output_token_ids


def test_choices_have_a_place_in_the_grammar_each(alone):
    siblings = [sequence(1 + i, choice=i) for i in (1, 2)]
    for sibling in siblings:
        sibling.prompt_token_ids[:] = sequence(1).prompt_token_ids
    ended = Worker().run(sequence(1, siblings=siblings))
    outputs = [ended[1 + i].sequence.output_token_ids for i in range(3)]
    assert outputs[0] == alone
    assert len(set(map(tuple, outputs))) == 3
    for output in outputs:
        if output[-1] == EOS:
            json.loads(text_of(output))


def test_max_tokens_cuts_an_output_and_says_so():
    (entry,) = Worker().run(sequence(1, max_tokens=5)).values()
    assert entry.sequence.finish_reason is FinishReason.LENGTH


def test_an_ending_that_the_grammar_forces_comes_before_min_tokens():
    params = SamplingParams(
        seed=1, min_tokens=50, eos_token_ids=frozenset({EOS}), grammar=regex("yes|no")
    )
    (entry,) = Worker().run(sequence(1, params)).values()
    assert text_of(entry.sequence.output_token_ids) in ("yes", "no")
    assert entry.sequence.finish_reason is FinishReason.EOS


def test_a_stop_id_within_the_grammar_cuts_the_output():
    params = SamplingParams(
        seed=1, eos_token_ids=frozenset({EOS}), stop_token_ids=frozenset({ord("b")}),
        grammar=regex("abc"), logit_bias=LogitBias({ord("a"): 50.0, ord("b"): 50.0}),
    )  # fmt: skip
    (entry,) = Worker().run(sequence(1, params)).values()
    assert entry.sequence.finish_reason is FinishReason.STOP_ID
    assert entry.sequence.output_token_ids == [ord("a"), ord("b")]
