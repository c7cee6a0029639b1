"""What every attention backend does, against attention's definition: the cases, and how to check.

Free of pytest, so that a GPU machine runs the same as the tests do. All batches lie over permuted
blocks; every slot that holds no token is NaN.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from worker.attention.base import AttentionMetadata, KVCacheSpec
from worker.attention.reference import ReferenceBackend
from worker.input_batch import build_input_batch
from worker.sequence import ScheduledSequence, SchedulerOutput

NUM_BLOCKS = 320
NAN = float("nan")
CPU = torch.device("cpu")
# (kv_len after the step, positions computed in it) per sequence, single positions first.
Step = Sequence[tuple[int, int]]

STEPS: dict[str, Step] = {
    "pure decode": [(1, 1), (7, 1), (33, 1), (34, 1)],
    "decode of equal lengths": [(21, 1), (21, 1)],
    "decode, lengths far apart": [(350, 1), (3, 1), (320, 1), (20, 1)],
    "prefill": [(19, 19), (5, 5)],
    "chunk with prefix": [(45, 9)],
    "mixed": [(50, 1), (1, 1), (30, 11), (8, 8)],
    "lengths at a multiple of the block": [(16, 1), (32, 1), (32, 16), (16, 16)],
}
# Longer than any split of keys that a backend might make, in few rows.
LONG_STEPS: dict[str, Step] = {
    "long decodes, alone": [(1300, 1)],
    "long decodes beside short ones": [(1025, 1), (512, 1), (513, 1), (7, 1)],
    "a chunk across many keys": [(1040, 3)],
}
# Query heads, KV heads, head size.
HEADS = (
    (2, 2, 64), (9, 3, 64), (4, 1, 128), (7, 1, 32), (16, 1, 96), (10, 2, 256), (16, 2, 128),
)  # fmt: skip
WINDOWS = (1, 4, 16, 17, 40, 1000)
# Beyond ordinary tests: several tiles of a prefill, many splits.
HEAVY_STEPS: dict[str, Step] = {
    "prefill of several tiles": [(300, 300), (129, 129), (64, 64)],
    "mixed, with long prefixes": [(700, 1), (2, 1), (900, 130), (257, 257), (40, 2)],
    "more keys than there are splits": [(9000, 1), (8192, 1), (8193, 1)],
}


class DeviationError(AssertionError):
    """A backend gave something else than attention's definition."""


@dataclass(frozen=True, slots=True)
class Case:
    """One step, and the model that takes it: heads, KV heads, head size, a window per layer.

    Blocks are `larger` times as large as the subject's.
    """

    step: Step
    heads: tuple[int, int, int] = (6, 2, 64)
    windows: tuple[int | None, ...] = (None, None)
    larger: int = 1


@dataclass(frozen=True, slots=True)
class Subject:
    """A backend, the dtype of its cache, and how far fp32 arithmetic on the same values may be.

    `memory` gives the tensors that may be filled with NaN before anything is written.
    """

    make: Callable[[], Any]
    dtype: torch.dtype
    tolerance: float
    memory: Callable[[Any], list[torch.Tensor]]
    block_size: int = 16
    device: torch.device = CPU


def cases(*, heavy: bool = False) -> dict[str, Case]:
    """By name; `heavy`: also what takes a GPU to be quick."""
    found = {name: Case(step) for name, step in STEPS.items()}
    for name, step in LONG_STEPS.items():
        found[name] = Case(step, (3, 1, 64), (None, 600))
    for heads in HEADS:
        found[f"{heads[0]} heads on {heads[1]} of {heads[2]}"] = Case(
            [(18, 1), (5, 1), (21, 17)], heads, (None,)
        )
    for name, window in itertools.product(("mixed", "decode, lengths far apart"), WINDOWS):
        found[f"{name}, window {window}"] = Case(STEPS[name], windows=(window, None))
    found["larger blocks"] = Case(STEPS["mixed"], larger=2)
    if heavy:
        for name, step in HEAVY_STEPS.items():
            found[name] = Case(step, (8, 2, 128), (None, 512))
    return found


def check(subject: Subject, case: Case) -> float:
    """The largest deviation among the case's rows. Raises DeviationError beyond the tolerance."""
    num_heads, kv_heads, head_dim = case.heads
    spec = KVCacheSpec(len(case.windows), kv_heads, head_dim, subject.dtype)
    block_size = subject.block_size * case.larger
    ours, oracle = both(subject, spec, block_size, case.step)
    metadata = planned(case.step, block_size)
    write(spec, metadata, subject.device, ours, oracle)
    generator, largest = torch.Generator().manual_seed(4), 0.0
    for layer, window in enumerate(case.windows):
        shape = (len(metadata.positions), num_heads, head_dim)
        query = torch.randn(shape, generator=generator).to(subject.dtype)
        attended = ours.attend(layer, query.to(subject.device), head_dim**-0.5, window)
        expected = oracle.attend(layer, query.float(), head_dim**-0.5, window)
        largest = max(largest, _compared(subject, attended, expected))
    return largest


def _compared(subject: Subject, attended: torch.Tensor, expected: torch.Tensor) -> float:
    if attended.dtype is not subject.dtype or attended.shape != expected.shape:
        raise DeviationError(
            f"{attended.dtype} {tuple(attended.shape)} in place of {subject.dtype} "
            f"{tuple(expected.shape)}"
        )
    found = attended.float().cpu()
    rounding = 2**-8 if subject.dtype is torch.bfloat16 else 0
    largest = (found - expected).abs().max().item()
    if not torch.allclose(found, expected, atol=subject.tolerance, rtol=rounding):
        rows = (found - expected).abs().amax(dim=(1, 2)).nan_to_num(torch.inf)
        raise DeviationError(f"deviates by {largest:.3g}, most in row {int(rows.argmax())}")
    return largest


def both(subject: Subject, spec: KVCacheSpec, block_size: int, step: Step) -> tuple[Any, Any]:
    """The backend and the oracle with the same prefixes; every slot that is not one is NaN."""
    ours, oracle = subject.make(), ReferenceBackend()
    for backend in (ours, oracle):
        backend.allocate(spec, num_blocks(step, block_size), block_size)
    for cache in (*subject.memory(ours), oracle.keys, oracle.values):
        cache.fill_(NAN)
    prefixes = planned([(kv_len, kv_len) for kv_len, _ in step], block_size)
    write(spec, prefixes, subject.device, ours, oracle)
    return ours, oracle


def num_blocks(step: Step, block_size: int) -> int:
    """Of a cache for such steps, the null block included: fewer if they are large."""
    needed = sum(-(-kv_len // block_size) for kv_len, _ in step)
    return max(min(NUM_BLOCKS, NUM_BLOCKS * 16 // block_size), needed + 1)


def planned(
    step: Step, block_size: int, seed: int = 0, last_blocks: Sequence[int] = ()
) -> AttentionMetadata:
    """The step's metadata over permuted, non-contiguous blocks.

    `last_blocks` are the last sequence's, beyond those that are handed out.
    """
    generator = torch.Generator().manual_seed(seed)
    count = num_blocks(step, block_size)
    free = (torch.randperm(count - 1, generator=generator) + 1).tolist()
    entries = []
    for index, (kv_len, count) in enumerate(step):
        needed = -(-kv_len // block_size)
        own = index == len(step) - 1 and len(last_blocks) > 0
        blocks = list(last_blocks[:needed]) if own else [free.pop() for _ in range(needed)]
        entries.append(ScheduledSequence(index, [0] * count, kv_len - count, blocks, None))
    output = SchedulerOutput(1, tuple(entries), sum(count for _, count in step))
    return build_input_batch(output, block_size).metadata


def write(
    spec: KVCacheSpec, metadata: AttentionMetadata, device: torch.device, ours: Any, *others: Any
) -> None:
    """The same random K and V of all layers; `ours` is on `device`, the others on the CPU."""
    generator = torch.Generator().manual_seed(3)
    shape = (len(metadata.positions), spec.num_kv_heads, spec.head_dim)
    ours.plan(moved(metadata, device))
    for backend in others:
        backend.plan(metadata)
    for layer in range(spec.num_layers):
        key, value = (torch.randn(shape, generator=generator).to(spec.dtype) for _ in range(2))
        ours.write_kv(layer, key.to(device), value.to(device))
        for backend in others:
            backend.write_kv(layer, key, value)


def moved(metadata: AttentionMetadata, device: torch.device) -> AttentionMetadata:
    """The same step with its tensors on `device`."""
    if device.type == "cpu":
        return metadata
    return replace(
        metadata,
        query_start=metadata.query_start.to(device),
        kv_lens=metadata.kv_lens.to(device),
        block_table=metadata.block_table.to(device),
        slot_mapping=metadata.slot_mapping.to(device),
        positions=metadata.positions.to(device),
    )


def with_padding(metadata: AttentionMetadata, rows: int) -> AttentionMetadata:
    """Decodes followed by `rows` empty ones, as CUDA graphs pad them: no slot, no keys."""
    count = metadata.num_sequences + rows
    empty = torch.zeros(rows, dtype=torch.int32)
    return AttentionMetadata(
        num_decodes=count,
        query_start=torch.arange(count + 1, dtype=torch.int32),
        kv_lens=torch.cat([metadata.kv_lens, empty]),
        block_table=torch.nn.functional.pad(metadata.block_table, (0, 0, 0, rows)),
        slot_mapping=torch.cat([metadata.slot_mapping, empty.long() - 1]),
        positions=torch.cat([metadata.positions, empty.long()]),
        query_start_host=list(range(count + 1)),
        kv_lens_host=[*metadata.kv_lens_host, *[0] * rows],
    )


def check_padding(subject: Subject) -> float:
    """Rows without keys give zeros and write nowhere but to the null block; the others' hold."""
    spec = KVCacheSpec(1, 2, 64, subject.dtype)
    step = STEPS["pure decode"]
    ours, oracle = both(subject, spec, subject.block_size, step)
    real = planned(step, subject.block_size)
    metadata = with_padding(real, 3)
    before = [cache.clone() for cache in subject.memory(ours)]
    ours.plan(moved(metadata, subject.device))
    oracle.plan(real)
    generator = torch.Generator().manual_seed(5)
    key, value = (
        torch.randn(len(metadata.positions), 2, 64, generator=generator).to(subject.dtype)
        for _ in range(2)
    )
    ours.write_kv(0, key.to(subject.device), value.to(subject.device))
    oracle.write_kv(0, key[:-3], value[:-3])
    changed = sum(
        int((old.nan_to_num(-1) != new.nan_to_num(-1)).sum())
        for old, new in zip(before, subject.memory(ours), strict=True)
    )
    # A backend without masked writes sends all of them to one slot of the null block.
    if changed > 2 * 2 * 64 * (len(step) + 1):
        raise DeviationError(f"{changed} numbers of the cache changed")
    query = torch.randn(len(metadata.positions), 6, 64, generator=generator).to(subject.dtype)
    attended = ours.attend(0, query.to(subject.device), 0.125)
    if not (attended[-3:] == 0).all():
        raise DeviationError("a row without keys gives something")
    return _compared(subject, attended[:-3], oracle.attend(0, query[:-3].float(), 0.125))


def check_permutation(subject: Subject) -> float:
    """Which blocks hold a sequence changes no bit."""
    spec = KVCacheSpec(1, 2, 64, subject.dtype)
    results = []
    for seed in (1, 2):
        ours = subject.make()
        ours.allocate(spec, NUM_BLOCKS, subject.block_size)
        step = STEPS["mixed"]
        whole = [(kv_len, kv_len) for kv_len, _ in step]
        for part in (whole, step):
            metadata = planned(part, subject.block_size, seed)
            write(spec, metadata, subject.device, ours)
        query = torch.randn(
            len(metadata.positions), 6, 64, generator=torch.Generator().manual_seed(6)
        )
        results.append(ours.attend(0, query.to(subject.device, subject.dtype), 0.125).cpu())
    if not torch.equal(*results):
        raise DeviationError("the same sequences in other blocks give other bits")
    return 0.0


def check_decode_alone(
    subject: Subject,
    lens: Sequence[int] = (5, 256, 257, 700, 1500),
    beside: Sequence[int] = (1500, 9, 600),
) -> float:
    """A decoding row of each length has the same bits alone, beside one row and beside several."""
    spec = KVCacheSpec(1, 2, 64, subject.dtype)
    for kv_len in lens:
        alone = _decoded(subject, spec, kv_len, ())
        for others in ([3], beside):
            if not torch.equal(_decoded(subject, spec, kv_len, others), alone):
                raise DeviationError(f"the bits of a row of {kv_len} keys depend on its batch")
    return 0.0


def _decoded(
    subject: Subject, spec: KVCacheSpec, kv_len: int, beside: Iterable[int]
) -> torch.Tensor:
    """One sequence's row; its blocks are the same whatever is beside it."""
    ours = subject.make()
    ours.allocate(spec, 2 * NUM_BLOCKS, subject.block_size)
    own = list(range(NUM_BLOCKS, NUM_BLOCKS + -(-kv_len // subject.block_size)))
    lens = [*beside, kv_len]
    for counts in (lens, [1] * len(lens)):
        metadata = planned(list(zip(lens, counts, strict=True)), subject.block_size, 7, own)
        ours.plan(moved(metadata, subject.device))
        ours.write_kv(0, *_values_of(spec, lens, counts, subject))
    query = torch.randn(6, 64, generator=torch.Generator().manual_seed(8)).expand(len(lens), 6, 64)
    attended: torch.Tensor = ours.attend(0, query.to(subject.device, subject.dtype), 0.125)
    return attended[-1].cpu()


def _values_of(
    spec: KVCacheSpec, lens: Sequence[int], counts: Sequence[int], subject: Subject
) -> Iterator[torch.Tensor]:
    """Keys and values of the last `counts` positions; a position's are the same in any batch."""
    for seed in (9, 10):
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(max(lens), spec.num_kv_heads, spec.head_dim, generator=generator)
        parts = [table[n - count : n] for n, count in zip(lens, counts, strict=True)]
        yield torch.cat(parts).to(subject.device, subject.dtype)


def check_shared_blocks(subject: Subject) -> float:
    """Two sequences whose first blocks are the same ones, as with a cached prefix."""
    spec, size = KVCacheSpec(1, 2, 64, subject.dtype), subject.block_size
    lens, tables = (2 * size + 8, 2 * size + 13), ([5, 3, 9], [5, 3, 11])
    ours, oracle = subject.make(), ReferenceBackend()
    for backend in (ours, oracle):
        backend.allocate(spec, 16, size)
    for cache in (*subject.memory(ours), oracle.keys, oracle.values):
        cache.fill_(NAN)
    for kv_len, count, table in zip(lens, (lens[0], 13), tables, strict=True):
        filled = planned([(kv_len, count)], size, 0, table)
        write(spec, filled, subject.device, ours, oracle)
    step = planned([(lens[0], 1), (lens[1], 9)], size, 0, tables[1])
    block_table, slots = step.block_table.clone(), step.slot_mapping.clone()
    block_table[0, :3] = torch.tensor(tables[0])
    slots[0] = tables[0][2] * size + 7
    step = replace(step, block_table=block_table, slot_mapping=slots)
    write(spec, step, subject.device, ours, oracle)
    query = torch.randn(10, 6, 64, generator=torch.Generator().manual_seed(11)).to(subject.dtype)
    attended = ours.attend(0, query.to(subject.device), 0.125)
    return _compared(subject, attended, oracle.attend(0, query.float(), 0.125))


PROPERTIES: dict[str, Callable[[Subject], float]] = {
    "padding rows": check_padding,
    "permuted blocks": check_permutation,
    "shared blocks": check_shared_blocks,
}
