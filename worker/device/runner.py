"""Launch steps on a device; collect what they drew."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from worker.attention.base import AttentionBackend
from worker.device.draws import draw
from worker.device.errors import telling_lost_device
from worker.device.graphs import DecodeGraphs, Recorder
from worker.device.inputs import InputBuffers
from worker.device.link import Link, Mark
from worker.device.told import Told, described, told
from worker.input_batch import InputBatch, build_input_batch
from worker.logit_controls import adjust
from worker.models.base import Model
from worker.prompt_scoring import scored_prompts
from worker.scores import PromptLogprobs, StepResult
from worker.sequence import Draw, SampledToken, SchedulerOutput
from worker.warm_up import warm_up

Backend = TypeVar("Backend", bound=AttentionBackend)


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest steps there are."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int

    @property
    def width(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)


class DeviceRunner(Generic[Backend]):
    """Holds the model and the backend whose cache is allocated. Call it from one thread.

    Two sets of buffers: captured decodes read theirs at fixed addresses, and need no room for
    prompts. The ids of the last step stay on the device, for tokens that are pending.
    """

    def __init__(self, model: Model[Backend], backend: Backend, link: Link, limits: Limits) -> None:
        self._model, self._backend, self._link, self._limits = model, backend, link, limits
        seqs, width = limits.max_num_seqs, limits.width
        self._decoding = InputBuffers(link, seqs, seqs, width)
        self._mixed = InputBuffers(link, limits.max_num_batched_tokens, seqs, width)
        self._graphs = DecodeGraphs(())
        self._last_ids = torch.zeros(1, dtype=torch.int64, device=link.device)
        self._last_rows: dict[int, int] = {}
        self.num_positions_fed = 0

    def capture(
        self,
        recorder: Recorder,
        sizes: Sequence[int],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Record decodes of these batch sizes. Nothing may be in flight.

        The cache must be the one that serves: its addresses are recorded. All sizes give
        their logits in the same memory, else each would keep some of its own.
        """
        graphs = DecodeGraphs(sizes)
        with torch.inference_mode():
            logits = torch.empty_like(self._decodes(max(sizes))())

            def recordable(size: int) -> Callable[[], torch.Tensor]:
                step, given = self._decodes(size), logits[:size]
                return lambda: given.copy_(step())

            graphs.record(recorder, recordable, progress)
        self._graphs = graphs

    def release_graphs(self) -> None:
        """Let go of what was captured."""
        self._graphs = DecodeGraphs(())

    def launch(self, output: SchedulerOutput) -> "DeviceStep":
        """Queue a step. Raises what building it raises, and DeviceLostError."""
        batch = build_input_batch(output, self._limits.block_size)
        self.num_positions_fed += len(batch.token_ids)
        with torch.inference_mode(), telling_lost_device("in a step"):
            logits, scores = self._computed(output, batch)
            if batch.draws:
                adjust(logits, batch.draws, self._link.upload)
            return self._drawn(logits, batch, scores)

    def warm_up(self) -> None:
        """Raises ValueError for a model that gives no numbers; else as `worker.warm_up`."""
        warm_up(self, self._limits.block_size)

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Launch a step and wait for it."""
        return self.launch(output).collect()

    def _computed(
        self, output: SchedulerOutput, batch: InputBatch
    ) -> tuple[torch.Tensor, dict[int, PromptLogprobs]]:
        """Logits [S, vocab_size] of the draws, and what scorings ask for."""
        num_rows = batch.metadata.num_sequences
        size = None
        is_scored = any(entry.scoring is not None for entry in output.scheduled)
        if batch.metadata.num_decodes == num_rows and not is_scored:
            size = self._graphs.size_for(num_rows)
        if size is not None:
            filled = self._filled(self._decoding, batch, size)
            logits = self._graphs.run(size)
            return self._of_draws(logits, filled, num_rows), {}
        filled = self._filled(self._mixed, batch, num_rows)
        self._backend.plan(filled.metadata)
        hidden = self._model.forward(filled.token_ids, filled.metadata.positions, self._backend)
        scores = scored_prompts(
            self._logits_on_host, hidden, output, batch.metadata.query_start_host
        )
        return self._model.logits(hidden.index_select(0, filled.sampled_rows)), scores

    def _filled(self, buffers: InputBuffers, batch: InputBatch, num_rows: int) -> InputBatch:
        rows = self._last_rows
        # One without a row failed: whatever is computed behind it is for nobody.
        sources = {at: rows[i] for at, i in batch.pending.items() if i in rows}
        for at in batch.pending.keys() - sources.keys():
            batch.token_ids[at] = 0
        filled = buffers.fill(batch, sources, num_rows)
        if sources:
            buffers.pending(filled, self._last_ids)
        return filled

    def _of_draws(self, logits: torch.Tensor, filled: InputBatch, num_rows: int) -> torch.Tensor:
        """Of the logits of every row of a graph those of the draws."""
        if len(filled.draws) == num_rows:
            return logits[:num_rows]
        return logits.index_select(0, filled.sampled_rows)

    def _drawn(
        self, logits: torch.Tensor, batch: InputBatch, scores: dict[int, PromptLogprobs]
    ) -> "DeviceStep":
        link, draws = self._link, batch.draws
        if not draws:
            self._last_rows = {}
            return DeviceStep(
                batch.sequence_ids, draws, None, Told(None, None), scores, link.mark()
            )
        drawn = draw(logits, draws, link)
        self._last_ids = drawn.ids
        self._last_rows = {sequence_id: row for row, sequence_id in enumerate(batch.sequence_ids)}
        # One copy for both: the id, or -1 for a row whose logits were no numbers.
        ids = link.download(torch.where(drawn.is_faulty, -1, drawn.ids))
        more = told(logits, drawn.ids, draws, link)
        return DeviceStep(batch.sequence_ids, draws, ids, more, scores, link.mark())

    def _logits_on_host(self, hidden: torch.Tensor) -> torch.Tensor:
        """Waits for the device: prompts are scored by the way, and rarely."""
        return self._model.logits(hidden).cpu()

    def _decodes(self, size: int) -> Callable[[], torch.Tensor]:
        """A step of `size` decodes over the buffers, whatever `fill` puts there; their logits."""
        metadata = self._decoding.decodes(size, self._limits.max_model_len)
        token_ids = self._decoding.token_ids(size)

        def step() -> torch.Tensor:
            self._backend.plan(metadata)
            hidden = self._model.forward(token_ids, metadata.positions, self._backend)
            return self._model.logits(hidden)

        return step


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step in the device's queue; `ids` int64 [S] come to the host, -1 where none is."""

    sequence_ids: list[int]
    draws: list[Draw]
    ids: torch.Tensor | None
    told: Told
    scores: dict[int, PromptLogprobs]
    mark: Mark

    def collect(self) -> StepResult:
        """Wait for it. Raises DeviceLostError."""
        with telling_lost_device("in a step"):
            self.mark.wait()
        if self.ids is None:
            return StepResult({}, self.scores)
        ids = self.ids.tolist()
        drawn: dict[int, SampledToken] = {
            sequence_id: token
            for sequence_id, token in zip(
                self.sequence_ids, described(ids, self.draws, self.told), strict=True
            )
            if token.token_id >= 0
        }
        return StepResult(drawn, self.scores)
