"""Run the model over one scheduled step and choose its tokens."""

from typing import Generic, TypeVar

import torch

from worker.attention.base import AttentionBackend
from worker.input_batch import InputBatch, build_input_batch
from worker.models.base import Model
from worker.prompt_scoring import scored_prompts
from worker.sampler import sample
from worker.scores import StepResult
from worker.sequence import SampledToken, SchedulerOutput
from worker.warm_up import warm_up

Backend = TypeVar("Backend", bound=AttentionBackend)


class ModelRunner(Generic[Backend]):
    """Holds the model and the backend whose cache is allocated. Call it from one thread.

    `num_positions_fed` counts the positions the model has computed since warm-up.
    """

    def __init__(self, model: Model[Backend], backend: Backend, block_size: int) -> None:
        self._model = model
        self._backend = backend
        self._block_size = block_size
        self._drawn: dict[int, SampledToken] = {}
        self.num_positions_fed = 0

    def launch(self, output: SchedulerOutput) -> StepResult:
        """Computed at once, on the caller's thread."""
        return self.execute(output)

    def execute(self, output: SchedulerOutput) -> StepResult:
        """What draws and scorings ask for. Raises whatever the model raises."""
        batch = build_input_batch(output, self._block_size)
        for at, sequence_id in batch.pending.items():
            # One without a token fails: whatever is computed behind it is for nobody.
            drawn = self._drawn.get(sequence_id)
            batch.token_ids[at] = drawn.token_id if drawn else 0
        with torch.inference_mode():
            self._backend.plan(batch.metadata)
            self.num_positions_fed += len(batch.token_ids)
            hidden = self._model.forward(batch.token_ids, batch.metadata.positions, self._backend)
            self._drawn = self._draw(batch, hidden)
            starts = batch.metadata.query_start_host
            scores = scored_prompts(self._model.logits, hidden, output, starts)
            return StepResult(self._drawn, scores)

    def _draw(self, batch: InputBatch, hidden: torch.Tensor) -> dict[int, SampledToken]:
        if not batch.draws:
            return {}
        logits = self._model.logits(hidden.index_select(0, batch.sampled_rows))
        drawn = zip(batch.sequence_ids, sample(logits, batch.draws), strict=True)
        return {sequence_id: token for sequence_id, token in drawn if token is not None}

    def warm_up(self) -> None:
        """Raises ValueError for a model that gives no numbers; else as `worker.warm_up`."""
        warm_up(self, self._block_size)
