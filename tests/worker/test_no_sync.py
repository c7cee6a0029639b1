"""Whatever a launch does, the host never waits in it; where it would, these tests say so."""

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    unset_fake_temporarily,
)

from tests.support.no_sync import FakeCudaLink, HostSyncError, NoSync, fake_cuda
from tests.support.recorders import CallRecorder
from tests.support.tiny_models import scheduled, step, tiny_llama
from worker.attention.padded import PaddedBackend
from worker.device import runner
from worker.device.link import HostLink
from worker.device.runner import DeviceRunner, Limits
from worker.input_batch import build_input_batch
from worker.kv_cache import allocate_kv_cache
from worker.models import weights
from worker.models.loader import open_checkpoint
from worker.sequence import PENDING_TOKEN, LogitBias
from worker.token_counts import TokenCounts

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=40, block_size=4)
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "top_k": {"temperature": 1.0, "seed": 5, "top_k": 7},
    "top_p and min_p": {"temperature": 1.0, "seed": 5, "top_p": 0.9, "min_p": 0.05},
    "logprobs": {"logprobs": 3},
    "min_tokens and bias": {
        "min_tokens": 3, "stop_token_ids": frozenset({4}), "logit_bias": LogitBias({3: 1.0}),
    },
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "grammar": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    return folder


def on_fake_cuda(folder):
    """The model with weights that have no content: nobody can look whether they are finite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_check_finite", lambda parameter, whole: None)
        return open_checkpoint(folder).load(device=torch.device("cuda"))


class AllowsAll:
    """A grammar that every id follows."""

    def fill(self, bits):
        bits[:] = -1


def entry(number, ids, first, kind):
    made = scheduled(number, ids, first, [number], **KINDS[kind])
    counts = TokenCounts([1], [2]) if kind == "penalties" else None
    matcher = AllowsAll() if kind == "grammar" else None
    draw = made.draw._replace(token_counts=counts, num_runners_up=2, matcher=matcher)
    return made._replace(draw=draw)


def steps():
    """Prompts, then their decodes, whose tokens are known to the device alone; mixed ones."""
    for kinds in (["greedy"], ["greedy", "top_k"], list(KINDS)):
        yield step(*(entry(i, [5, 6], 0, kind) for i, kind in enumerate(kinds, 1)))
        yield step(*(entry(i, [PENDING_TOKEN], 2, kind) for i, kind in enumerate(kinds, 1)))
    yield step(entry(1, [7], 1, "greedy"), entry(2, [8, 9], 1, "top_k"))


@pytest.fixture(autouse=True)
def batches_have_content(monkeypatch):
    """The host's own arithmetic is done on numbers, whatever the device holds."""

    def build(*arguments):
        with unset_fake_temporarily():
            return build_input_batch(*arguments)

    monkeypatch.setattr(runner, "build_input_batch", build)


def runner_on(link, model, sizes):
    backend = PaddedBackend(link.device)
    allocate_kv_cache(backend, model.kv_spec, 12, LIMITS.block_size)
    made = DeviceRunner(model, backend, link, LIMITS)
    if sizes:
        made.capture(CallRecorder(), sizes)
    return made


@pytest.mark.parametrize("sizes", [(), (4, 8)], ids=["eager", "graphs"])
def test_a_launch_reads_nothing_back(folder, sizes):
    made = runner_on(HostLink(), open_checkpoint(folder).load(), sizes)
    for each in steps():
        with NoSync():
            made.launch(each)


@pytest.mark.parametrize("sizes", [(), (4, 8)], ids=["eager", "graphs"])
def test_a_launch_on_a_cuda_device_neither_reads_back_nor_copies_blocking(folder, sizes):
    """All shapes follow from the host's numbers: fake tensors have no others."""
    with fake_cuda():
        model = on_fake_cuda(folder)
        made = runner_on(FakeCudaLink(), model, sizes)
        for each in steps():
            with NoSync():
                launched = made.launch(each)
        assert launched.ids.shape == (2,)


class Planted:
    """A model that asks for something that the host would have to wait for."""

    def __init__(self, model, ask):
        self._model, self.kv_spec, self._ask = model, model.kv_spec, ask

    def forward(self, *arguments):
        return self._model.forward(*arguments)

    def logits(self, hidden):
        logits = self._model.logits(hidden)
        self._ask(logits)
        return logits


SYNCS = {
    "item": lambda logits: logits[0, 0].item(),
    "bool": lambda logits: bool((logits > 3).any()),
    "nonzero": lambda logits: (logits > 3).nonzero(),
    "mask": lambda logits: logits[logits > 3],
    "masked_select": lambda logits: logits.masked_select(logits > 3),
    "assignment by a mask": lambda logits: logits.__setitem__(logits > 3, 0.0),
    "unique": lambda logits: logits.unique(),
}
COPIES = {
    "cpu": lambda logits: logits.cpu(),
    "tolist": lambda logits: logits.tolist(),
    "a tensor of the host's": lambda logits: torch.tensor([1, 2]).to(logits.device),
}


@pytest.mark.parametrize("ask", SYNCS.values(), ids=SYNCS)
def test_a_planted_wait_is_found(folder, ask):
    made = runner_on(HostLink(), Planted(open_checkpoint(folder).load(), ask), ())
    with NoSync(), pytest.raises(HostSyncError):
        made.launch(next(steps()))


@pytest.mark.parametrize("ask", (SYNCS | COPIES).values(), ids=SYNCS | COPIES)
def test_a_planted_wait_is_found_on_a_cuda_device(folder, ask):
    with fake_cuda():
        model = on_fake_cuda(folder)
        made = runner_on(FakeCudaLink(), Planted(model, ask), ())
        with NoSync(), pytest.raises((HostSyncError, DataDependentOutputException)):
            made.launch(next(steps()))
