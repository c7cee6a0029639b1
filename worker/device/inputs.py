"""A step's inputs in memory that keeps its address: what captured graphs read."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker.attention.base import AttentionMetadata
from worker.device.link import Link, Mark
from worker.input_batch import InputBatch

_ALIGNMENT = 16
# Staging memory is written again only after a copy that lies so many steps back.
_STAGES = 2
Array = npt.NDArray[Any]


class InputBuffers:
    """Device memory for steps of up to `max_tokens` positions of `max_seqs` sequences.

    One block of bytes holds all inputs, each at a fixed place, so that a step costs one copy:
    that of what lies before the last row used of the block table.
    """

    def __init__(self, link: Link, max_tokens: int, max_seqs: int, width: int) -> None:
        """`width`: blocks that the longest sequence has."""
        self._link = link
        shapes: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
            "token_ids": ((max_tokens,), np.int64),
            "positions": ((max_tokens,), np.int64),
            "slot_mapping": ((max_tokens,), np.int64),
            "sources": ((max_tokens,), np.int64),
            "sampled_rows": ((max_seqs,), np.int64),
            "query_start": ((max_seqs + 1,), np.int32),
            "kv_lens": ((max_seqs,), np.int32),
            "block_table": ((max_seqs, width), np.int32),
        }
        ends, end = [0], 0
        for shape, kind in shapes.values():
            size = int(np.prod(shape)) * np.dtype(kind).itemsize
            end = -(-(end + size) // _ALIGNMENT) * _ALIGNMENT
            ends.append(end)
        places = dict(zip(shapes, pairwise(ends), strict=True))
        self._table_start, self._row_bytes = places["block_table"][0], width * 4
        memory = torch.zeros(end, dtype=torch.uint8, device=link.device)
        self._memory = memory
        self._device = {
            name: _view(memory[slice(*places[name])], shape, kind)
            for name, (shape, kind) in shapes.items()
        }
        self._stages = [_Stage(link.staging(end), shapes, places) for _ in range(_STAGES)]

    def fill(self, batch: InputBatch, sources: Mapping[int, int], num_rows: int) -> InputBatch:
        """The same batch on the device; of decodes, padded to `num_rows` sequences.

        `sources` has, of pending positions, the row of the last step's ids that holds theirs.
        Padding computes one position each on the null block: block 0 is nobody's.
        """
        metadata, padding = batch.metadata, num_rows - batch.metadata.num_sequences
        num_tokens = len(batch.token_ids)
        stage = self._stages[0]
        self._stages.reverse()
        host = stage.arrays()
        _put(host["token_ids"], batch.token_ids, padding, 0)
        _put(host["positions"], metadata.positions, padding, 0)
        _put(host["slot_mapping"], metadata.slot_mapping, padding, 0)
        host["sources"][: num_tokens + padding] = -1
        for at, row in sources.items():
            host["sources"][at] = row
        host["sampled_rows"][: len(batch.sampled_rows)] = batch.sampled_rows.numpy()
        starts = metadata.query_start.numpy()
        host["query_start"][: len(starts)] = starts
        host["query_start"][len(starts) : num_rows + 1] = starts[-1] + np.arange(1, padding + 1)
        _put(host["kv_lens"], metadata.kv_lens, padding, 1)
        table = metadata.block_table.numpy()
        host["block_table"][:num_rows] = 0
        host["block_table"][: len(table), : table.shape[1]] = table
        self._send(stage, num_rows)
        known = metadata.query_start_host
        padded = self._metadata(
            num_rows,
            num_tokens + padding,
            table.shape[1],
            metadata.num_decodes + padding,
            [*known, *range(known[-1] + 1, known[-1] + padding + 1)],
            [*metadata.kv_lens_host, *[1] * padding],
        )
        return replace(
            batch,
            token_ids=self.token_ids(num_tokens + padding),
            metadata=padded,
            sampled_rows=self._device["sampled_rows"][: len(batch.sampled_rows)],
        )

    def token_ids(self, count: int) -> torch.Tensor:
        """Of the first positions, int64 [count]."""
        return self._device["token_ids"][:count]

    def decodes(self, num_rows: int, longest: int) -> AttentionMetadata:
        """Of so many decodes, each of up to `longest` tokens, whatever `fill` puts there."""
        width = self._device["block_table"].shape[1]
        starts, lens = list(range(num_rows + 1)), [longest] * num_rows
        return self._metadata(num_rows, num_rows, width, num_rows, starts, lens)

    def pending(self, batch: InputBatch, drawn: torch.Tensor) -> None:
        """Put the last step's ids [S] in the places of tokens that are pending."""
        sources = self._device["sources"][: len(batch.token_ids)]
        found = drawn.index_select(0, sources.clamp_min(0))
        batch.token_ids.copy_(torch.where(sources >= 0, found, batch.token_ids))

    def _send(self, stage: "_Stage", num_rows: int) -> None:
        used = self._table_start + num_rows * self._row_bytes
        self._memory[:used].copy_(stage.memory[:used], non_blocking=True)
        stage.sent = self._link.mark()

    def _metadata(
        self,
        num_rows: int,
        num_tokens: int,
        width: int,
        num_decodes: int,
        starts: list[int],
        lens: list[int],
    ) -> AttentionMetadata:
        device = self._device
        return AttentionMetadata(
            num_decodes=num_decodes,
            query_start=device["query_start"][: num_rows + 1],
            kv_lens=device["kv_lens"][:num_rows],
            block_table=device["block_table"][:num_rows, :width],
            slot_mapping=device["slot_mapping"][:num_tokens],
            positions=device["positions"][:num_tokens],
            query_start_host=starts,
            kv_lens_host=lens,
        )


class _Stage:
    """Host memory of one step's inputs."""

    def __init__(
        self,
        memory: torch.Tensor,
        shapes: Mapping[str, tuple[tuple[int, ...], type[np.generic]]],
        places: Mapping[str, tuple[int, int]],
    ) -> None:
        self.memory = memory
        self.sent: Mark | None = None
        whole = memory.numpy()
        self._arrays = {
            name: _array(whole[slice(*places[name])], shape, kind)
            for name, (shape, kind) in shapes.items()
        }

    def arrays(self) -> dict[str, Array]:
        """To be written; its last copy has run by then."""
        if self.sent is not None:
            self.sent.wait()
        return self._arrays


def _put(into: Array, values: torch.Tensor, padding: int, filler: int) -> None:
    into[: len(values)] = values.numpy()
    into[len(values) : len(values) + padding] = filler


def _array(raw: Array, shape: tuple[int, ...], kind: type[np.generic]) -> Array:
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    return raw[:size].view(kind).reshape(shape)


def _view(raw: torch.Tensor, shape: tuple[int, ...], kind: type[np.generic]) -> torch.Tensor:
    dtype = torch.int64 if kind is np.int64 else torch.int32
    return raw[: int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape)
