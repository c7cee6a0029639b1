"""Steps on a device are the host's steps: captured or not, padded or not, one ahead or not."""

from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.recorders import CallRecorder
from tests.support.tiny_models import VOCAB, scheduled, step, tiny_llama
from worker.attention.padded import PaddedBackend
from worker.attention.torch_backend import TorchBackend
from worker.block_pool import BlockPool
from worker.device.graphs import DecodeGraphs, capture_sizes
from worker.device.inputs import InputBuffers
from worker.device.link import HostLink
from worker.device.runner import DeviceRunner, Limits
from worker.engine import Engine
from worker.input_batch import build_input_batch
from worker.kv_cache import allocate_kv_cache
from worker.model_runner import ModelRunner
from worker.models.loader import open_checkpoint
from worker.scheduler import Scheduler
from worker.sequence import PENDING_TOKEN, LogitBias, SamplingParams, Scoring, Sequence

LIMITS = Limits(max_num_seqs=6, max_num_batched_tokens=24, max_model_len=60, block_size=4)
NUM_BLOCKS = 60
ENDS = {"eos_token_ids": frozenset({2}), "stop_token_ids": frozenset({27, 90})}
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=11),
    SamplingParams(seed=12, top_k=9),
    SamplingParams(seed=13, top_p=0.8, logprobs=2),
    SamplingParams(
        temperature=0.9, top_k=30, top_p=0.95, min_p=0.01, seed=2026, min_tokens=5,
        presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2,
        logit_bias=LogitBias({21: 1.5, 40: -3.0}), **ENDS,
    ),
    SamplingParams(temperature=0.0, logprobs=0, min_tokens=3, **ENDS),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    return open_checkpoint(folder).load()


def on_device(model, sizes=()):
    """A runner on a "device", with graphs of these sizes, and what was replayed."""
    backend, recorder = PaddedBackend(torch.device("cpu")), CallRecorder()
    allocate_kv_cache(backend, model.kv_spec, NUM_BLOCKS + 1, LIMITS.block_size)
    runner = DeviceRunner(model, backend, HostLink(), LIMITS)
    if sizes:
        runner.capture(recorder, sizes)
    return runner, recorder.replayed


def on_host(model):
    backend = TorchBackend()
    allocate_kv_cache(backend, model.kv_spec, NUM_BLOCKS + 1, LIMITS.block_size)
    return ModelRunner(model, backend, LIMITS.block_size), None


def streams(runner, requests, ahead, num_blocks=NUM_BLOCKS):
    """Outputs of requests (arrival, prompt length, max_tokens, kind), however they meet."""
    scheduler = Scheduler(
        BlockPool(num_blocks, LIMITS.block_size), max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens, max_model_len=LIMITS.max_model_len,
    )  # fmt: skip
    engine = Engine(scheduler, runner, look_ahead=100, steps_ahead=ahead)
    sequences, told = [], {}
    for number, (_, length, max_tokens, kind) in enumerate(requests):
        prompt = [(number * 31 + at * 7) % VOCAB for at in range(length)]
        sequences.append(Sequence(number, prompt, KINDS[kind], max_tokens, number))
    for turn in count():
        for sequence, (arrival, *_) in zip(sequences, requests, strict=True):
            if arrival == turn:
                engine.submit(sequence, 0.0)
        output = engine.step()
        assert output.failure is None
        for update in output.updates:
            if update.token:
                told.setdefault(update.sequence.sequence_id, []).append(update.token)
        scheduler.check_integrity()
        if turn > 12 and not engine.has_work:
            break
    assert scheduler.pool.num_used == 0
    return told


def assert_same(ours, theirs, tolerance=2e-3):
    """The same tokens; what is told of them up to rounding."""
    assert ours.keys() == theirs.keys()
    for key, tokens in ours.items():
        assert [t.token_id for t in tokens] == [t.token_id for t in theirs[key]]
        for mine, other in zip(tokens, theirs[key], strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=tolerance)
            assert [i for i, _ in mine.alternatives] == [i for i, _ in other.alternatives]


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 9), st.integers(1, 30), st.integers(1, 9), st.integers(0, len(KINDS) - 1),
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip
SIZES = st.sampled_from([(1, 2, 6), (3, 6), (6,), (2,)])
AHEAD = st.sampled_from([0, 1])


@settings(max_examples=4, deadline=None)
@given(REQUESTS, SIZES, AHEAD)
def test_graphs_change_no_stream_while_batches_grow_and_shrink(model, requests, sizes, ahead):
    """Padded rows write to nobody's slot, and no row of a larger batch is left over."""
    captured, replayed = on_device(model, sizes)
    eager, _ = on_device(model)
    assert_same(streams(captured, requests, ahead), streams(eager, requests, 0), 1e-5)
    decodes = any(max_tokens > 1 for _, _, max_tokens, _ in requests)
    assert not decodes or replayed or max(sizes) < 6


@pytest.mark.soak
@settings(max_examples=60, deadline=None)
@given(REQUESTS, SIZES, AHEAD)
def test_graphs_change_none_of_many_streams(model, requests, sizes, ahead):
    captured, eager = on_device(model, sizes)[0], on_device(model)[0]
    assert_same(streams(captured, requests, ahead), streams(eager, requests, 0), 1e-5)


@settings(max_examples=4, deadline=None)
@given(REQUESTS, AHEAD)
def test_the_device_says_what_the_host_says(model, requests, ahead):
    """Another backend, another sampler, tokens that the host never saw: the same streams."""
    device, _ = on_device(model, (1, 2, 4, 6))
    host, _ = on_host(model)
    assert_same(streams(device, requests, ahead), streams(host, requests, 0))


def test_preemption_beside_steps_in_flight(model):
    requests = [(0, 9, 14, 0), (0, 8, 14, 1), (1, 7, 14, 2), (2, 9, 12, 3)]
    device, _ = on_device(model, (1, 2, 4, 6))
    host, _ = on_host(model)
    tight = streams(device, requests, 1, num_blocks=12)
    assert_same(tight, streams(host, requests, 0))


def test_padding_writes_to_the_null_block_alone(model):
    runner, replayed = on_device(model, (6,))
    runner.execute(step(scheduled(1, [5, 6, 7], 0, [9])))
    cache = runner._backend._cache
    before = cache.clone()
    runner.execute(step(scheduled(1, [8], 3, [9]), scheduled(2, [4], 0, [11])))
    changed = (cache != before).flatten(3).any(dim=3).any(dim=0).any(dim=0)
    assert changed.nonzero().flatten().tolist() == [0, 9, 11]
    assert replayed == [6]


def test_a_prompt_is_scored_though_it_is_computed_position_by_position(model):
    """Such a step looks like a decode, but asks for more than its graph gives."""
    runner, replayed = on_device(model, (1, 2))
    host, _ = on_host(model)
    scoring = Scoring(0, [6], 1)
    scored = step(scheduled(1, [5], 0, [9])._replace(scoring=scoring, draw=None))
    ours, theirs = (each.execute(scored).prompt_logprobs[1] for each in (runner, host))
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert list(ours.alternative_ids) == list(theirs.alternative_ids)
    assert replayed == []


def test_a_sequence_without_numbers_fails_alone_and_nothing_behind_it_is_told(model):
    """Its next step is under way by then."""

    class Broken:
        kv_spec = model.kv_spec
        forward = staticmethod(model.forward)

        def logits(self, hidden):
            logits = model.logits(hidden)
            logits[0] = torch.nan
            return logits

    runner, _ = on_device(Broken())
    first = runner.launch(step(scheduled(1, [5, 6], 0, [9]), scheduled(2, [5, 6], 0, [10])))
    second = runner.launch(
        step(scheduled(1, [PENDING_TOKEN], 2, [9]), scheduled(2, [PENDING_TOKEN], 2, [10]))
    )
    third = runner.launch(step(scheduled(3, [PENDING_TOKEN], 2, [9])))
    assert [list(s.collect().tokens) for s in (first, second, third)] == [[2], [2], []]


def test_staging_is_not_written_while_a_copy_of_it_may_run():
    """Its mark is waited for before its turn comes again."""

    class Counted(HostLink):
        def __init__(self):
            self.marks, self.waited = 0, []

        def mark(self):
            self.marks += 1
            return _Mark(self.marks, self.waited)

    class _Mark:
        def __init__(self, number, waited):
            self.number, self.waited = number, waited

        def wait(self):
            self.waited.append(self.number)

    link = Counted()
    buffers = InputBuffers(link, 8, 4, 3)
    batch = build_input_batch(step(scheduled(1, [5], 0, [2])), 4)
    waited = []
    for _ in range(4):
        buffers.fill(batch, {}, 2)
        waited.append(list(link.waited))
    assert waited == [[], [], [1], [1, 2]]


def test_sizes_are_dense_where_padding_costs_most_and_end_with_the_largest_batch():
    assert capture_sizes(1) == [1]
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    sizes = capture_sizes(512)
    assert sizes[:5] == [1, 2, 4, 8, 16]
    assert sizes[-2:] == [496, 512]
    assert len(sizes) == 3 + 32 + 16


def test_recording_begins_with_the_largest_and_a_batch_takes_the_next_that_holds_it():
    recorder, made = CallRecorder(), []
    graphs = DecodeGraphs([2, 8, 4])
    assert graphs.size_for(1) is None
    graphs.record(recorder, lambda size: made.append(size) or (lambda: torch.zeros(size)))
    assert made == [8, 4, 2]
    assert [graphs.size_for(n) for n in (1, 2, 3, 8, 9)] == [2, 2, 4, 8, None]
