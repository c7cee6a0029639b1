"""Run the model over one scheduled step and choose its tokens."""

from typing import Generic, TypeVar

import torch

from worker.attention.base import AttentionBackend
from worker.input_batch import InputBatch, build_input_batch
from worker.models.base import Model
from worker.prompt_scoring import scored
from worker.sampler import sample
from worker.scores import PromptLogprobs, StepResult
from worker.sequence import Draw, SampledToken, SamplingParams, ScheduledSequence, SchedulerOutput

Backend = TypeVar("Backend", bound=AttentionBackend)
_WARM_UP_TOKENS = 64


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
            return StepResult(self._drawn, self._score(output, batch, hidden))

    def _draw(self, batch: InputBatch, hidden: torch.Tensor) -> dict[int, SampledToken]:
        if not batch.draws:
            return {}
        logits = self._model.logits(hidden.index_select(0, batch.sampled_rows))
        drawn = zip(batch.sequence_ids, sample(logits, batch.draws), strict=True)
        return {sequence_id: token for sequence_id, token in drawn if token is not None}

    def _score(
        self, output: SchedulerOutput, batch: InputBatch, hidden: torch.Tensor
    ) -> dict[int, PromptLogprobs]:
        starts, scores = batch.metadata.query_start_host, {}
        for start, entry in zip(starts, output.scheduled, strict=False):
            if entry.scoring is not None:
                told = scored(self._model.logits, hidden[start:], entry.scoring)
                if told is not None:
                    scores[entry.sequence_id] = told
        return scores

    def warm_up(self) -> None:
        """A prefill and a decode before anything is cached, so that no request pays for firsts.

        It writes to the first blocks after the null one; nothing may be in use yet. Raises
        ValueError for a model that gives no numbers.
        """
        tokens = min(_WARM_UP_TOKENS, self._block_size)
        for first, count in ((0, tokens - 1), (tokens - 1, 1)):
            if count and not self.execute(_warm_up_step(first, count)).tokens:
                raise ValueError("the model's logits are NaN or infinite: its weights are damaged")
        self.num_positions_fed = 0


def _warm_up_step(first: int, count: int) -> SchedulerOutput:
    draw = Draw(SamplingParams(top_p=0.5), output_index=0)
    scheduled = ScheduledSequence(0, [0] * count, first, [1], draw)
    return SchedulerOutput(0, (scheduled,), count)
