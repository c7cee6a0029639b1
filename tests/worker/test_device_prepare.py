"""A device's memory is divided by what was measured; what cannot be is refused with numbers."""

from dataclasses import replace

import pytest
import torch

from tests.support.recorders import CallRecorder
from tests.support.tiny_models import tiny_llama
from worker.attention.selection import GPU_BACKENDS, Machine
from worker.config import DEVICE_BACKENDS, WorkerConfig
from worker.device.link import HostLink
from worker.device.memory import Usage, device_budget
from worker.device.prepare import Device, prepare_on_device, why_no_device
from worker.device.runner import DeviceRunner
from worker.models.loader import open_checkpoint
from worker.warm_up import largest_step

TOTAL, OTHERS, ACTIVATIONS = 6 << 20, 1 << 20, 1 << 19
FIRST_GRAPH, FURTHER_GRAPH = 1 << 18, 1 << 14
LARGEST = 40


class Meter:
    """Someone else holds OTHERS; what graphs take is added by the recorder."""

    def __init__(self):
        self.graphs = 0
        self.largest = 0

    def total(self):
        return TOTAL

    def free(self):
        return TOTAL - OTHERS - self.graphs

    def watch(self):
        return 1 << 20

    def peak(self):
        """A step needs memory by its size."""
        return (1 << 20) + ACTIVATIONS * self.largest // LARGEST

    def give_back(self):
        pass


class Recorder(CallRecorder):
    def __init__(self, meter, recorded):
        super().__init__()
        self._meter, self._recorded, self._own = meter, recorded, []
        recorded.append(self._own)

    def record(self, step):
        self._meter.graphs += FURTHER_GRAPH if self._own else FIRST_GRAPH
        recorded = super().record(step)
        self._own.append(len(recorded.given))
        return recorded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    return folder


def nothing(name):
    raise ImportError(name)


def prepared(folder, **settings):
    """The network, its runner, the sizes that each recorder recorded, and the stages told."""
    meter, recorded, stages = Meter(), [], []
    machine = Machine(torch.device("cpu"), (9, 0), nothing, lambda name: None)
    device = Device(machine, HostLink(), meter, lambda: Recorder(meter, recorded), "float32")
    values = {"model": folder, "max_num_seqs": 6, "max_num_batched_tokens": LARGEST}
    config = WorkerConfig(**(values | settings))
    launch = DeviceRunner.launch

    def measured(runner, output):
        meter.largest = max(meter.largest, output.num_tokens)
        return launch(runner, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceRunner, "launch", measured)
        network, runner = prepare_on_device(
            config, open_checkpoint(folder), device,
            lambda stage, done, total: stages.append(stage),
        )  # fmt: skip
    return network, runner, recorded, list(dict.fromkeys(stages))


GRAPHS = FIRST_GRAPH + 3 * FURTHER_GRAPH  # 6, 4, 2, 1


def test_the_cache_gets_what_the_largest_step_and_the_graphs_leave(folder):
    network, _, recorded, stages = prepared(folder)
    spec = network.size.spec
    left = int(TOTAL * 0.9) - OTHERS - ACTIVATIONS - GRAPHS
    assert network.size.num_blocks == left // (16 * spec.bytes_per_token) - 1
    assert recorded == [[6, 4], [6, 4, 2, 1]]
    assert stages == ["loading weights", "measuring memory", "warming up", "capturing graphs"]
    assert f"{ACTIVATIONS:,} of the largest step" in network.size.reason
    assert network.backend.name == "torch_padded"
    assert [told.partition(":")[0] for told in network.passed_over] == list(GPU_BACKENDS[:4])


def test_without_graphs_nothing_is_put_by_for_them(folder):
    network, _, recorded, stages = prepared(folder, enforce_eager=True)
    left = int(TOTAL * 0.9) - OTHERS - ACTIVATIONS
    assert network.size.num_blocks == left // (16 * network.size.spec.bytes_per_token) - 1
    assert recorded == []
    assert "capturing graphs" not in stages


def test_what_is_given_is_taken_if_it_is_there(folder):
    network, *_ = prepared(folder, kv_cache_memory_bytes=1 << 20)
    assert network.size.num_bytes <= 1 << 20
    with pytest.raises(ValueError, match=rf"kv_cache_memory_bytes {TOTAL:,} exceeds the"):
        prepared(folder, kv_cache_memory_bytes=TOTAL)


def test_a_share_that_holds_no_cache_is_refused_with_all_numbers():
    usage = Usage(total=1000, held=700, activations=150, graphs=60)
    with pytest.raises(ValueError, match=r"0.9 of 1,000 bytes is 900.* 910 are needed.*700 held"):
        device_budget(None, 0.9, usage)
    budget = device_budget(None, 0.95, usage)
    assert (budget.num_bytes, budget.most) == (40, 90)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(folder):
    meter = Meter()
    meter.graphs = TOTAL - OTHERS - 10
    machine = Machine(torch.device("cpu"), (9, 0), nothing, lambda name: None)
    device = Device(machine, HostLink(), meter, CallRecorder, "float32")
    checkpoint = open_checkpoint(folder)
    unread = replace(checkpoint, source=None)
    with pytest.raises(ValueError, match="exceed the 10 that are free on the device"):
        prepare_on_device(WorkerConfig(model=folder), unread, device, lambda *told: None)


def test_running_out_of_memory_at_the_start_is_told_in_a_line(folder, monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr("worker.device.prepare.allocate_kv_cache", full)
    with pytest.raises(ValueError, match=r"out of memory while it was prepared: CUDA.* 2 GiB$"):
        prepared(folder)


@pytest.mark.parametrize(
    ("seqs", "tokens", "longest", "counts"),
    [(3, 10, 100, [3, 3, 4]), (4, 4, 100, [1, 1, 1, 1]), (2, 50, 8, [8, 8])],
)
def test_the_largest_step_is_as_large_as_steps_get(seqs, tokens, longest, counts):
    output = largest_step(seqs, tokens, longest, block_size=4)
    assert [entry.num_tokens for entry in output.scheduled] == counts
    assert output.num_tokens == sum(counts)
    assert all(entry.draw and set(entry.block_ids) == {1} for entry in output.scheduled)


def test_who_wants_a_gpu_where_there_is_none_is_told(folder):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for settings in ({"device": "cuda"}, {"attention_backend": "triton"}):
        config = WorkerConfig(model=folder, **settings)
        assert config.may_use_device
        assert "finds no CUDA device" in why_no_device(config)
    assert not WorkerConfig(model=folder, attention_backend="torch").may_use_device
    assert not WorkerConfig(model=folder, script=folder).may_use_device
    with pytest.raises(ValueError, match="attention_backend triton needs a GPU"):
        WorkerConfig(model=folder, device="cpu", attention_backend="triton")


def test_backends_that_may_be_asked_for_are_those_that_there_are():
    assert (*DEVICE_BACKENDS, "torch") == GPU_BACKENDS
