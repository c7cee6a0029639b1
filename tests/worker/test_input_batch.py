"""A scheduled step becomes packed tensors with every id at its position and slot."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.input_batch import build_input_batch
from worker.sequence import Draw, SamplingParams, ScheduledSequence, SchedulerOutput

DRAW = Draw(SamplingParams(), 0)


def batch_of(entries, block_size):
    total = sum(entry.num_tokens for entry in entries)
    return build_input_batch(SchedulerOutput(1, tuple(entries), total), block_size)


def test_a_mixed_step():
    """One decode at position 5 and a chunk of positions 2 to 4, blocks of 4."""
    batch = batch_of(
        [
            ScheduledSequence(30, [101], 5, [7, 2], DRAW),
            ScheduledSequence(31, [201, 202, 203], 2, [9, 4], None),
            ScheduledSequence(32, [301, 302], 0, [5], DRAW),
        ],
        block_size=4,
    )
    metadata = batch.metadata
    assert batch.token_ids.tolist() == [101, 201, 202, 203, 301, 302]
    assert metadata.positions.tolist() == [5, 2, 3, 4, 0, 1]
    assert metadata.slot_mapping.tolist() == [2 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, 4 * 4, 20, 21]
    assert metadata.query_start.tolist() == metadata.query_start_host == [0, 1, 4, 6]
    assert metadata.kv_lens.tolist() == metadata.kv_lens_host == [6, 5, 2]
    assert metadata.block_table.tolist() == [[7, 2], [9, 4], [5, 0]]
    assert metadata.num_decodes == 1
    assert batch.sampled_rows.tolist() == [0, 5]
    assert batch.sequence_ids == [30, 32]
    assert batch.draws == [DRAW, DRAW]


def test_dtypes_are_those_of_the_interface():
    metadata = batch_of([ScheduledSequence(1, [5], 0, [1], DRAW)], 16).metadata
    for tensor in (metadata.query_start, metadata.kv_lens, metadata.block_table):
        assert tensor.dtype is torch.int32
    assert metadata.slot_mapping.dtype is metadata.positions.dtype is torch.int64


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=12),
    st.integers(1, 17),
    st.booleans(),
)
def test_every_position_has_the_slot_its_block_table_says(spans, block_size, reverse):
    spans.sort(key=lambda span: span[1] > 1)
    entries, next_block = [], 1
    for index, (first, count) in enumerate(spans):
        needed = -(-(first + count) // block_size)
        blocks = list(range(next_block, next_block + needed))
        next_block += needed
        ids = list(range(1000 * index, 1000 * index + count))
        entries.append(
            ScheduledSequence(index, ids, first, blocks[::-1] if reverse else blocks, DRAW)
        )
    batch = batch_of(entries, block_size)
    expected = [
        (
            token,
            position,
            entry.block_ids[position // block_size] * block_size + position % block_size,
        )
        for entry in entries
        for token, position in zip(entry.token_ids, range(entry.first_position, 1000), strict=False)
    ]
    metadata = batch.metadata
    found = zip(
        batch.token_ids.tolist(), metadata.positions.tolist(), metadata.slot_mapping.tolist(),
        strict=True,
    )  # fmt: skip
    assert list(found) == expected
    assert len(set(metadata.slot_mapping.tolist())) == len(expected)
    assert metadata.num_decodes == sum(count == 1 for _, count in spans)
