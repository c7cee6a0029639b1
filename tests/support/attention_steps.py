"""Steps for attention backends: batches over permuted blocks, and what was written before."""

import torch

from worker.attention.base import AttentionMetadata
from worker.input_batch import build_input_batch
from worker.sequence import ScheduledSequence, SchedulerOutput

NUM_BLOCKS = 320
NAN = float("nan")

# (kv_len after the step, positions computed in it) per sequence, single positions first.
STEPS = {
    "pure decode": [(1, 1), (7, 1), (33, 1), (34, 1)],
    "decode of equal lengths": [(21, 1), (21, 1)],
    "decode, lengths far apart": [(350, 1), (3, 1), (320, 1), (20, 1)],
    "prefill": [(19, 19), (5, 5)],
    "chunk with prefix": [(45, 9)],
    "mixed": [(50, 1), (1, 1), (30, 11), (8, 8)],
    "lengths at a multiple of the block": [(16, 1), (32, 1), (32, 16), (16, 16)],
}


def planned(step, block_size, seed=0, last_blocks=()) -> AttentionMetadata:
    """The step's metadata over permuted, non-contiguous blocks.

    `last_blocks` are the last sequence's, beyond those that are handed out.
    """
    generator = torch.Generator().manual_seed(seed)
    free = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()
    entries = []
    for index, (kv_len, count) in enumerate(step):
        needed = -(-kv_len // block_size)
        own = index == len(step) - 1 and len(last_blocks) > 0
        blocks = last_blocks[:needed] if own else [free.pop() for _ in range(needed)]
        entries.append(ScheduledSequence(index, [0] * count, kv_len - count, blocks, None))
    output = SchedulerOutput(1, tuple(entries), sum(count for _, count in step))
    return build_input_batch(output, block_size).metadata


def write(spec, metadata, *backends):
    """The same random K and V of all layers into each of the backends."""
    torch.manual_seed(3)
    shape = (len(metadata.positions), spec.num_kv_heads, spec.head_dim)
    for backend in backends:
        backend.plan(metadata)
    for layer in range(spec.num_layers):
        key, value = torch.randn(shape).to(spec.dtype), torch.randn(shape).to(spec.dtype)
        for backend in backends:
            backend.write_kv(layer, key, value)
