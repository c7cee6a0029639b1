"""A stream follows from its request alone: company, blocks, chunks and workers change nothing."""

from itertools import permutations

import pytest
import torch

from worker.block_pool import BlockPool
from worker.engine import Engine
from worker.kv_cache import allocate_kv_cache
from worker.model_runner import ModelRunner
from worker.scheduler import Scheduler
from worker.scripted import ScriptedCache, ScriptedModel, ScriptSet
from worker.sequence import LogitBias, SamplingParams, Sequence

VOCAB, EOS, BLOCK_SIZE = 64, 2, 4
# Few ids, so that penalties matter; candidates are half as likely each.
SCRIPTS = ScriptSet(mean_output_tokens=12, token_ids=(20, 28))
ENDS = {"eos_token_ids": frozenset({EOS}), "stop_token_ids": frozenset({27})}
EVERYTHING = SamplingParams(
    temperature=0.9, top_k=20, top_p=0.95, min_p=0.02, seed=2026, min_tokens=9,
    presence_penalty=1.4, frequency_penalty=0.8, repetition_penalty=1.3,
    logit_bias=LogitBias({21: 1.5, 40: -3.0}), logprobs=3, **ENDS,
)  # fmt: skip


class Worker:
    """An engine over a scripted model. Every step is checked for what it holds."""

    def __init__(self, *, num_blocks=200, budget=64, max_num_seqs=8, caching=True):
        cache = ScriptedCache()
        self.model = ScriptedModel(SCRIPTS, VOCAB, EOS)
        allocate_kv_cache(cache, self.model.kv_spec, num_blocks + 1, BLOCK_SIZE)
        self.scheduler = Scheduler(
            BlockPool(num_blocks, BLOCK_SIZE),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=200,
            enable_prefix_caching=caching,
        )
        runner = ModelRunner(self.model, cache, BLOCK_SIZE)
        self.engine = Engine(self.scheduler, runner, look_ahead=100)

    def run(self, *sequences, late=()):
        """Compute all to their ends; `late` ones join one a step, from the third step on."""
        for sequence in sequences:
            self.engine.submit(sequence, 0.0)
        late, steps, ended = list(late), 0, {}
        while not steps or self.engine.has_work or late:
            steps += 1
            if steps > 2 and late:
                self.engine.submit(late.pop(0), 0.0)
            for entry in self.engine.step().ended:
                ended[entry.sequence.sequence_id] = entry
            self.scheduler.check_integrity()
        assert self.scheduler.pool.num_used == 0
        return ended


def sequence(number, params=EVERYTHING, *, max_tokens=30, prompt=None, **fields):
    prompt = [20 + (number * 3 + at) % 8 for at in range(11)] if prompt is None else prompt
    return Sequence(number, prompt, params, max_tokens, order=number, **fields)


def solo(params=EVERYTHING, **fields):
    (entry,) = Worker().run(sequence(1, params, **fields)).values()
    return entry.sequence.output_token_ids


COMPANY = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5, top_k=3),
    SamplingParams(seed=6, frequency_penalty=1.0),
    SamplingParams(temperature=0.0, repetition_penalty=2.0, logprobs=0),
    SamplingParams(seed=7, logit_bias=LogitBias({25: 4.0})),
    SamplingParams(temperature=1e-5, seed=8),
    SamplingParams(temperature=2.0, seed=9, logprobs=5),
]


@pytest.mark.parametrize("neighbours", [0, 1, 7])
@pytest.mark.parametrize("join_late", [False, True])
def test_a_seeded_stream_is_the_same_in_any_company(neighbours, join_late):
    """SMP-01: neighbours of every kind run beside it, and join while it runs."""
    others = [sequence(2 + i, params) for i, params in enumerate(COMPANY[:neighbours])]
    together = [] if join_late else others
    ended = Worker().run(*together, sequence(1), late=others if join_late else ())
    assert ended[1].sequence.output_token_ids == solo()


@pytest.mark.parametrize(
    "circumstances",
    [{"budget": 8}, {"caching": False}, {"num_blocks": 13, "budget": 8}],
    ids=["chunks", "no prefix cache", "preemption"],
)
def test_chunks_caching_and_preemption_change_no_stream(circumstances):
    others = [sequence(2 + i, params) for i, params in enumerate(COMPANY[:3])]
    ended = Worker(**circumstances).run(*others, sequence(9, prompt=sequence(1).prompt_token_ids))
    assert ended[9].sequence.output_token_ids == solo()
    preempted = sum(entry.sequence.num_preemptions for entry in ended.values())
    assert (preempted > 0) == ("num_blocks" in circumstances)


@pytest.mark.parametrize(
    "params",
    [
        EVERYTHING,
        SamplingParams(
            seed=5,
            repetition_penalty=0.3,
            logit_bias=LogitBias({21: 2.0, 22: 2.0}),
            min_tokens=9,
            **ENDS,
        ),
        SamplingParams(seed=3, presence_penalty=2.0, min_tokens=9, **ENDS),
        SamplingParams(seed=4, frequency_penalty=-2.0, min_tokens=9, **ENDS),
    ],
    ids=["everything", "repetition", "presence", "frequency"],
)
def test_for_every_k_a_second_worker_goes_on_as_the_first_would_have(params):
    """Penalties, min_tokens and the ids that end it count from the end of the prompt."""
    whole = solo(params, prompt=[20, 20])
    assert 9 < len(whole) <= 30
    for k in range(len(whole) + 1):
        given = sequence(1, params, prompt=[20, 20], output_token_ids=whole[:k], num_given_tokens=k)
        (entry,) = Worker().run(given).values()
        assert entry.sequence.output_token_ids == whole


RAISED = LogitBias(dict.fromkeys(range(20, 28), 3.0))
PARIS = [
    (SamplingParams(temperature=0.0, repetition_penalty=2.0, logit_bias=RAISED), 12),
    (SamplingParams(seed=1, top_k=1), 3),
    (SamplingParams(temperature=0.0, frequency_penalty=1.5), 12),
    (SamplingParams(temperature=0.0), 12),
]


def test_each_of_24_orders_of_arrival_gives_each_request_its_own_output():
    """SMP-05: one of four ends early, so that the others' rows shift."""
    prompt = [22, 22, 22, 22]
    alone = [solo(params, max_tokens=count, prompt=prompt) for params, count in PARIS]
    assert len({tuple(ids) for ids in alone}) == 4
    for order in permutations(range(4)):
        arriving = [
            sequence(place, PARIS[i][0], max_tokens=PARIS[i][1], prompt=prompt)
            for place, i in enumerate(order, start=1)
        ]
        ended = Worker().run(*arriving)
        outputs = [ended[place].sequence.output_token_ids for place in range(1, 5)]
        assert outputs == [alone[i] for i in order]


def choices_of(n, params=EVERYTHING):
    siblings = [sequence(1 + i, params, choice=i, prompt=PROMPT) for i in range(1, n)]
    return sequence(1, params, prompt=PROMPT, siblings=siblings)


PROMPT = [20 + at % 7 for at in range(14)]


@pytest.mark.parametrize(
    "circumstances", [{}, {"budget": 8}, {"num_blocks": 14}, {"caching": False}]
)
def test_the_first_choice_is_that_of_n_1_and_the_others_differ(circumstances):
    """Each choice is the stream that its address has alone; one prefill serves them all."""
    ended = Worker(**circumstances).run(choices_of(4))
    outputs = [ended[1 + i].sequence.output_token_ids for i in range(4)]
    assert outputs[0] == solo(prompt=PROMPT)
    assert outputs == [solo(prompt=PROMPT, choice=i) for i in range(4)]
    assert len({tuple(output) for output in outputs}) == 4
    if not circumstances:
        # 14 tokens: three full blocks are shared, two tokens are computed again.
        recomputed = [entry.account.computed_tokens for entry in ended.values()]
        lengths = [len(entry.sequence.output_token_ids) for entry in ended.values()]
        firsts = [c - n + 1 for c, n in zip(recomputed, lengths, strict=True)]
        assert sorted(firsts) == [2, 2, 2, 14]


def test_logits_that_are_no_numbers_cost_the_sequence_that_has_them():
    worker = Worker()
    logits = worker.model.logits

    def faulty(hidden):
        rows = logits(hidden)
        if len(rows) == 3:
            rows[1] = torch.nan
        return rows

    worker.model.logits = faulty
    ended = worker.run(*(sequence(i, max_tokens=12, prompt=PROMPT[i:]) for i in (1, 2, 3)))
    failures = {number: entry.failure for number, entry in ended.items()}
    assert failures == {1: "", 2: "the logits were no numbers", 3: ""}
    assert ended[1].sequence.output_token_ids == solo(max_tokens=12, prompt=PROMPT[1:])
    assert ended[3].sequence.output_token_ids == solo(max_tokens=12, prompt=PROMPT[3:])
