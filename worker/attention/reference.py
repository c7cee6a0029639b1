"""Attention by its definition, row by row: what backends are tested against."""

import torch

from worker.attention.base import AttentionMetadata, KVCacheSpec


class ReferenceBackend:
    """Row by row, on a CPU, in fp32. Every line can be checked by eye."""

    name = "reference"
    row_exact = True
    captures_decodes = False
    default_block_size = 16

    def allocate(self, spec: KVCacheSpec, num_blocks: int, block_size: int) -> None:
        shape = (spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.keys = torch.zeros(shape, dtype=spec.dtype)
        self.values = torch.zeros(shape, dtype=spec.dtype)
        self._block_size = block_size

    def plan(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for row, slot in enumerate(self._metadata.slot_mapping.tolist()):
            place = (layer, *divmod(slot, self._block_size))
            self.keys[place], self.values[place] = key[row], value[row]

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None = None
    ) -> torch.Tensor:
        attended = torch.zeros_like(query)
        starts, lens = self._metadata.query_start.tolist(), self._metadata.kv_lens.tolist()
        for sequence, kv_len in enumerate(lens):
            start, end = starts[sequence], starts[sequence + 1]
            for row in range(start, end if kv_len else start):
                last = kv_len - (end - row)
                first = 0 if window is None else max(0, last - window + 1)
                visible = range(first, last + 1)
                self._attend_one(layer, sequence, visible, query[row], scale, attended[row])
        return attended

    def _attend_one(
        self,
        layer: int,
        sequence: int,
        visible: range,
        query: torch.Tensor,
        scale: float,
        attended: torch.Tensor,
    ) -> None:
        """query and attended [num_heads, head_dim]; positions `visible` are seen."""
        keys, values = (
            self._read(self.keys, layer, sequence, visible),
            self._read(self.values, layer, sequence, visible),
        )
        group = query.shape[0] // keys.shape[1]
        keys, values = (heads.repeat_interleave(group, dim=1) for heads in (keys, values))
        scores = (query.float() * keys).sum(dim=2)
        weights = torch.softmax(scores * scale, dim=0)
        attended.copy_((weights.unsqueeze(2) * values).sum(dim=0))

    def _read(
        self, cache: torch.Tensor, layer: int, sequence: int, positions: range
    ) -> torch.Tensor:
        """fp32 [len(positions), num_kv_heads, head_dim], read through the block table."""
        at = torch.arange(positions.start, positions.stop)
        blocks = self._metadata.block_table[sequence][at // self._block_size].long()
        return cache[layer, blocks, at % self._block_size].float()
