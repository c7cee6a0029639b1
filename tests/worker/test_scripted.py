"""The scripted model replays scripts, and notices a cache that holds the wrong thing."""

import json

import pytest
import torch

from worker.block_pool import BlockPool
from worker.model_runner import ModelRunner
from worker.scheduler import Scheduler
from worker.scripted import (
    Fault,
    Script,
    ScriptedCache,
    ScriptedFault,
    ScriptedModel,
    ScriptSet,
    load_scripts,
)
from worker.sequence import SamplingParams, Sequence


class Harness:
    def __init__(self, scripts):
        self.slept = []
        model = ScriptedModel(scripts, vocab_size=300, eos_token_id=2, sleep=self.slept.append)
        self.cache = ScriptedCache()
        self.cache.allocate(model.kv_spec, 33, 4)
        self.runner = ModelRunner(model, self.cache, 4)
        self.scheduler = Scheduler(
            BlockPool(32, 4),
            max_num_seqs=4,
            max_num_batched_tokens=8,
            max_model_len=100,
        )

    def generate(self, prompt, max_tokens=10):
        sampling = SamplingParams(temperature=0.0, eos_token_ids=frozenset({2}))
        sequence = Sequence(1, list(prompt), sampling, max_tokens, order=1)
        self.scheduler.add(sequence)
        while (output := self.scheduler.schedule()) is not None:
            self.scheduler.update(output, self.runner.execute(output))
        return sequence.output_token_ids


def script(prompt, output, **more):
    return ScriptSet((Script(tuple(prompt), tuple(output), **more),), mean_output_tokens=0)


def test_a_script_is_replayed_whatever_the_chunks():
    prompt = range(10, 33)
    assert Harness(script(prompt, [7, 8, 2])).generate(prompt) == [7, 8, 2]


def test_given_logits_replace_the_given_id():
    scripts = script([5], [7, 2], logits={0: {7: 0.0, 9: 1.0}})
    assert Harness(scripts).generate([5], max_tokens=1) == [9]


def test_an_unscripted_prompt_babbles_the_same_each_time_and_others_differently():
    first = Harness(ScriptSet(mean_output_tokens=0)).generate([5, 6])
    assert first == Harness(ScriptSet(mean_output_tokens=0)).generate([5, 6])
    assert first != Harness(ScriptSet(mean_output_tokens=0)).generate([6, 5])
    assert len(first) == 10


def test_babble_stays_in_its_range_and_ends_at_the_given_rate():
    assert set(Harness(ScriptSet((), 0.0, 0, (40, 43))).generate([5], 90)) <= {40, 41, 42}
    lengths = [len(Harness(ScriptSet(mean_output_tokens=5)).generate([n], 90)) for n in range(200)]
    assert 4 < sum(lengths) / len(lengths) < 6.2


def test_faults_happen_at_their_output_index():
    scripts = script([5], [7, 8, 9, 2], faults={1: Fault("sleep", 0.25), 2: Fault("raise")})
    harness = Harness(scripts)
    with pytest.raises(ScriptedFault):
        harness.generate([5])
    assert harness.slept == [0.25]


@pytest.mark.parametrize("what", ["position", "content"])
def test_a_wrong_block_is_noticed(what):
    harness = Harness(script([5, 6, 7, 8, 9], [7, 8, 2]))
    sampling = SamplingParams(temperature=0.0)
    harness.scheduler.add(Sequence(1, [5, 6, 7, 8, 9], sampling, 5, order=1))
    output = harness.scheduler.schedule()
    harness.scheduler.update(output, harness.runner.execute(output))
    if what == "position":
        harness.cache._positions[:] -= 1
        with pytest.raises(RuntimeError, match="does not hold position 4"):
            harness.runner.execute(harness.scheduler.schedule())
    else:
        harness.cache._states[:] += 1
        output = harness.scheduler.schedule()
        assert harness.runner.execute(output).tokens[1].token_id != 8


def test_logits_give_the_scripted_id_all_the_probability():
    model = ScriptedModel(script([5], [7]), vocab_size=10, eos_token_id=2)
    state = next(iter(model._lines))
    logits = model.logits(torch.tensor([[state]]))
    assert logits.shape == (1, 10)
    assert logits.softmax(-1)[0, 7] == 1.0


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        json.dumps({"scripts": [{"prompt_token_ids": [1]}]}),
        json.dumps({"token_ids": [5, 5]}),
        json.dumps(
            {
                "scripts": [
                    {
                        "prompt_token_ids": [1],
                        "output_token_ids": [],
                        "faults": {"0": {"kind": "explode"}},
                    }
                ]
            }
        ),
    ],
)
def test_a_malformed_script_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "script.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"script\.json is not a script file"):
        load_scripts(path)
