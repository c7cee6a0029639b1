"""One step's batch as tensors, built from the scheduler's ids and counts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from worker.attention.base import AttentionMetadata
from worker.sequence import PENDING_TOKEN, Draw, ScheduledSequence, SchedulerOutput

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InputBatch:
    """token_ids int64 [T]; the rest per drawing sequence, S of them, in scheduled order.

    sampled_rows int64 [S]: the last scheduled position of each, among the T. `pending` maps
    positions among the T, whose ids are PENDING_TOKEN, to the sequences that they are of.
    """

    token_ids: torch.Tensor
    metadata: AttentionMetadata
    sampled_rows: torch.Tensor
    sequence_ids: list[int]
    draws: list[Draw]
    pending: dict[int, int]


def build_input_batch(output: SchedulerOutput, block_size: int) -> InputBatch:
    """Pack all scheduled positions one after the other.

    Arithmetic is done in numpy, once over the whole batch: at 256 sequences torch's
    overhead per call would outweigh it.
    """
    scheduled = output.scheduled
    counts = _ints((s.num_tokens for s in scheduled), len(scheduled))
    first = _ints((s.first_position for s in scheduled), len(scheduled))
    starts = np.zeros(len(scheduled) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts)
    table = _block_table(scheduled)
    blocks = table[np.repeat(np.arange(len(scheduled)), counts), positions // block_size]
    token_ids = _ints(chain.from_iterable(s.token_ids for s in scheduled), int(starts[-1]))
    drawing = [row for row, s in enumerate(scheduled) if s.draw is not None]
    return InputBatch(
        token_ids=torch.from_numpy(token_ids),
        metadata=_metadata(
            counts, starts, first + counts, table, blocks * block_size + positions % block_size,
            positions,
        ),
        sampled_rows=torch.from_numpy(starts[1:][drawing] - 1),
        sequence_ids=[scheduled[row].sequence_id for row in drawing],
        draws=[s.draw for s in scheduled if s.draw is not None],
        pending=_pending(token_ids, starts, scheduled),
    )  # fmt: skip


def _pending(
    token_ids: Ints, starts: Ints, scheduled: Sequence[ScheduledSequence]
) -> dict[int, int]:
    positions = np.flatnonzero(token_ids == PENDING_TOKEN)
    if not len(positions):
        return {}
    rows = np.searchsorted(starts, positions, side="right") - 1
    return {int(at): scheduled[row].sequence_id for at, row in zip(positions, rows, strict=True)}


def _metadata(
    counts: Ints, starts: Ints, kv_lens: Ints, table: Ints, slots: Ints, positions: Ints
) -> AttentionMetadata:
    several = np.flatnonzero(counts > 1)
    return AttentionMetadata(
        num_decodes=int(several[0]) if len(several) else len(counts),
        query_start=torch.from_numpy(starts.astype(np.int32)),
        kv_lens=torch.from_numpy(kv_lens.astype(np.int32)),
        block_table=torch.from_numpy(table.astype(np.int32)),
        slot_mapping=torch.from_numpy(slots),
        positions=torch.from_numpy(positions),
        query_start_host=starts.tolist(),
        kv_lens_host=kv_lens.tolist(),
    )


def _block_table(scheduled: Sequence[ScheduledSequence]) -> Ints:
    """[R, W], block 0 where a sequence has fewer than W."""
    widths = _ints((len(s.block_ids) for s in scheduled), len(scheduled))
    table = np.zeros((len(scheduled), int(widths.max())), np.int64)
    used = np.arange(table.shape[1]) < widths[:, None]
    table[used] = _ints(chain.from_iterable(s.block_ids for s in scheduled), int(widths.sum()))
    return table


def _ints(values: Iterable[int], count: int) -> Ints:
    return np.fromiter(values, np.int64, count)
