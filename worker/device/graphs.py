"""Decode steps as CUDA graphs: recorded once for a few batch sizes, then replayed.

A replay costs the host one call, where a step would cost it one for each kernel. All sizes
share one pool of memory, so what one gives is overwritten by the next replay of any.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

Step = Callable[[], torch.Tensor]
# Small batches gain most and waste most by padding.
_FEW = (1, 2, 4)
_STEP, _WIDE_STEP, _WIDE = 8, 16, 256


class Recorded(Protocol):
    """A step that was recorded: the tensor that it gives, filled anew by each replay."""

    @property
    def given(self) -> torch.Tensor: ...

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Records steps that read and write memory of fixed addresses alone."""

    def record(self, step: Step) -> Recorded: ...


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record, ascending; the largest is max_num_seqs."""
    sizes = [*_FEW, *range(_STEP, _WIDE + 1, _STEP), *range(_WIDE, max_num_seqs, _WIDE_STEP)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


class DecodeGraphs:
    """One recorded step for each of some batch sizes; a batch is padded to the next of them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sorted(sizes)
        self._recorded: dict[int, Recorded] = {}

    def record(
        self,
        recorder: Recorder,
        step_of: Callable[[int], Step],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Largest first: the smaller ones find their memory in the pool already."""
        with _no_garbage_collection():
            for done, size in enumerate(reversed(self._sizes)):
                progress(done, len(self._sizes))
                self._recorded[size] = recorder.record(step_of(size))
        progress(len(self._sizes), len(self._sizes))

    def size_for(self, num_rows: int) -> int | None:
        """The rows to pad a batch of decodes to; None if none is recorded that is as large."""
        return next((s for s in self._sizes if s >= num_rows and s in self._recorded), None)

    def run(self, size: int) -> torch.Tensor:
        """What the step of that size gives; valid until the next run of any size."""
        recorded = self._recorded[size]
        recorded.replay()
        return recorded.given


class CudaRecorder:
    """Records CUDA graphs into one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> "_CudaGraph":
        """Runs it before: what compiles, loads or allocates for good must not be recorded."""
        self._warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            given = step()
        return _CudaGraph(graph, given)

    def _warm_up(self, step: Step) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class _CudaGraph:
    graph: torch.cuda.CUDAGraph
    given: torch.Tensor

    def replay(self) -> None:
        self.graph.replay()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A tensor freed by a collection while a graph is recorded would be freed in it."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
