"""Where the parts run, and which backends there are."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from worker.attention.base import AttentionBackend
from worker.attention.selection import GPU_BACKENDS, Demand, Machine, choose


@dataclass(frozen=True, slots=True)
class Setting:
    """The device, and whether everything is to be as small as it can be.

    Nothing new begins `seconds` after the setting was made.
    """

    device: torch.device
    tiny: bool
    deadline: float

    @classmethod
    def of(cls, device: str, tiny: bool, seconds: float) -> "Setting":
        return cls(torch.device(device), tiny, time.monotonic() + seconds)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_cuda else torch.float32

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads and head size: an 8B Llama's."""
        return (4, 2, 64) if self.tiny else (32, 8, 128)

    @property
    def free_bytes(self) -> int:
        """Of the device, what nobody uses any more included; of a host, enough to be tiny."""
        if not self.is_cuda:
            return 1 << 30
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


def demand(setting: Setting, dtype: torch.dtype | None = None) -> Demand:
    num_heads, num_kv_heads, head_dim = setting.heads
    return Demand(dtype or setting.dtype, head_dim, num_heads, num_kv_heads)


def present(setting: Setting) -> dict[str, str]:
    """Each backend that GPUs have, and why it cannot run here; "" if it can."""
    machine, found = Machine.of(setting.device), {}
    for name in GPU_BACKENDS:
        try:
            choose(name, demand(setting), machine)
        except ValueError as error:
            found[name] = str(error).removeprefix(f"attention_backend {name} cannot be used: ")
        else:
            found[name] = ""
    return found


def runnable(setting: Setting) -> Iterator[tuple[str, Callable[[], AttentionBackend]]]:
    """The backends that can run here, and how to make one."""
    machine = Machine.of(setting.device)
    for name, reason in present(setting).items():
        if not reason:
            yield name, partial(_made, name, demand(setting), machine)


def _made(name: str, asked: Demand, machine: Machine) -> AttentionBackend:
    return choose(name, asked, machine).backend


def seconds_of(setting: Setting, run: Callable[[], object], times: int) -> float:
    """Of one run, when it is run so often in a row; a run before that is not counted.

    On a GPU the runs are replays of a graph: its own time, without Python's.
    """
    run()
    if not setting.is_cuda:
        started = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - started) / times
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    make_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    begin, end = make_event(enable_timing=True), make_event(enable_timing=True)
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times
