"""Compile every Triton kernel for Hopper (sm_90a), GPU or not, and tell what it takes of one.

The launches are those that the backend itself makes: it runs on CPU tensors, and its kernels are
replaced by recorders. The assembler comes with triton.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker.attention import triton_backend
from worker.attention.base import AttentionMetadata, KVCacheSpec
from worker.attention.triton_backend import BLOCK_MULTIPLE, DTYPES, TritonBackend
from worker.attention.triton_tiles import HEAD_DIMS, SPLIT

# What one thread block of an H100 or H200 can have.
SHARED_BYTES = 227 * 1024
REGISTERS = 255
_KERNELS = ("attention_kernel", "combine_kernel", "write_kernel", "rotate_and_write_kernel")
_POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernels are compiled apart for."""

    head_dim: int
    dtype: torch.dtype
    group: int = 4
    block_size: int = BLOCK_MULTIPLE
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as assembled. `spilled` bytes of registers lie in memory."""

    kernel: str
    head_dim: int
    dtype: str
    group: int
    windowed: bool
    shared: int
    registers: int
    spilled: int
    wgmma: int
    mma: int
    cubin: int

    @property
    def faults(self) -> list[str]:
        """Limits that it breaks; empty for one that a Hopper GPU runs as meant."""
        found = []
        if not self.cubin:
            found.append("no cubin")
        if self.shared > SHARED_BYTES:
            found.append(f"{self.shared} bytes of shared memory, {SHARED_BYTES} exist")
        if self.registers > REGISTERS:
            found.append(f"{self.registers} registers, {REGISTERS} exist")
        if self.kernel == "prefill" and self.dtype != "float32" and not self.wgmma:
            found.append("no wgmma")
        return found


class _Recorder:
    """In a kernel's place: keeps the arguments of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: object) -> Any:
        def launch(*args: Any, **named: Any) -> None:
            self.launches.append((args, named))

        return launch


def shapes(*, full: bool) -> Iterator[Shape]:
    """All head sizes and dtypes that the backend claims; else the most usual one."""
    if not full:
        yield Shape(128, torch.bfloat16)
        return
    for head_dim in HEAD_DIMS:
        for dtype in DTYPES:
            yield from (Shape(head_dim, dtype), Shape(head_dim, dtype, window=512))
    for group in (1, 3, 7, 8, 16):
        yield Shape(128, torch.bfloat16, group)
    for block_size in (32, 64, 128, 256):
        yield Shape(128, torch.bfloat16, block_size=block_size)


def compiled(shape: Shape, only: Sequence[str] = ()) -> Iterator[Compiled]:
    """Each kernel that the backend launches for such a model; `only` those of these names."""
    launches = {
        _told(kernel, named): (kernel, args, named) for kernel, args, named in _launches(shape)
    }
    for name, (kernel, args, named) in launches.items():
        if not only or name in only:
            yield _compile(kernel, name, shape, args, named)


def num_variants(shape: Shape) -> dict[str, int]:
    """How many of each kernel are compiled over steps of many kinds: more than one stalls steps."""
    variants: dict[str, set[str]] = {}
    for kernel, args, named in _launches(shape):
        variants.setdefault(_told(kernel, named), set()).add(str(_specialised(kernel, args, named)))
    return {name: len(found) for name, found in variants.items()}


def _told(kernel: Any, named: dict[str, Any]) -> str:
    if "DECODE" not in named:
        return str(kernel.__name__).removesuffix("_kernel")
    if not named["DECODE"]:
        return "prefill"
    return "decode, split" if named["PARTIAL"] else "decode"


def _launches(shape: Shape) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Of decodes with and without splits, a chunk, and the writes of both kinds."""
    recorders = {name: _Recorder(getattr(triton_backend, name)) for name in _KERNELS}
    kept = {name: recorder.kernel for name, recorder in recorders.items()}
    try:
        for name, recorder in recorders.items():
            setattr(triton_backend, name, recorder)
        _run(shape)
    finally:
        for name, kernel in kept.items():
            setattr(triton_backend, name, kernel)
    return [(r.kernel, *launch) for r in recorders.values() for launch in r.launches]


def _run(shape: Shape) -> None:
    """Steps of 1, 16 and 17 decodes with and without splits, beside 1, 3 and 16 chunks."""
    kv_heads = 2
    spec = KVCacheSpec(1, kv_heads, shape.head_dim, shape.dtype)
    backend = TritonBackend(torch.device("cpu"))
    backend.allocate(spec, 16, shape.block_size)
    for longest, decodes, chunks in itertools.product((SPLIT, 2 * SPLIT), (1, 16, 17), (1, 3, 16)):
        metadata = _metadata(longest, decodes, chunks)
        backend.plan(metadata)
        count = len(metadata.positions)
        heads = torch.zeros(count, kv_heads * (shape.group + 2), shape.head_dim, dtype=shape.dtype)
        turned, value = heads[:, :-kv_heads], heads[:, -kv_heads:]
        angles = torch.zeros(count, 1, shape.head_dim // 2)
        backend.write_kv(0, value, value)
        query = backend.rotate_and_write(0, turned, value, angles, angles)
        backend.attend(0, query, 0.125, shape.window)


def _metadata(longest: int, decodes: int, chunks: int) -> AttentionMetadata:
    """Decodes of `longest` positions and chunks of 7."""
    lens = [longest] * decodes + [7] * chunks
    starts = list(itertools.accumulate([1] * decodes + [7] * chunks, initial=0))
    return AttentionMetadata(
        num_decodes=decodes,
        query_start=torch.tensor(starts, dtype=torch.int32),
        kv_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=torch.zeros(len(lens), 31 + chunks, dtype=torch.int32),
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int64),
        positions=torch.zeros(starts[-1], dtype=torch.int64),
        query_start_host=starts,
        kv_lens_host=lens,
    )


def _compile(
    kernel: Any, name: str, shape: Shape, args: tuple[Any, ...], named: dict[str, Any]
) -> Compiled:
    options = {key: named[key] for key in _OPTIONS if key in named}
    source = ASTSource(kernel, *_specialised(kernel, args, named))
    built: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = built.asm["ptx"]
    registers, spilled = _registers(built.asm["cubin"])
    return Compiled(
        name, shape.head_dim, str(shape.dtype).removeprefix("torch."), shape.group,
        shape.window is not None, built.metadata.shared, registers, spilled,
        len(re.findall(r"wgmma\.mma_async", ptx)), ptx.count("mma.sync"), len(built.asm["cubin"]),
    )  # fmt: skip


def _specialised(
    kernel: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """Types, constants and known multiples of 16, as a launch has them."""
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **named}
    signature: dict[str, str] = {}
    constants, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        signature[argument], aligned = _type_of(kernel.params[index], values[argument])
        if signature[argument] == "constexpr":
            constants[(index,)] = values[argument]
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _type_of(parameter: Any, value: Any) -> tuple[str, bool]:
    """As the launcher specialises arguments: ones are constants, multiples of 16 are known."""
    if parameter.is_constexpr:
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype], value.data_ptr() % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    if parameter.do_not_specialize:
        return "i32", False
    return ("constexpr", False) if value == 1 else ("i32", value % 16 == 0)


def _registers(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack: where registers are spilled."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", str(file)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", told)
    if used is None:
        raise ValueError(f"{tool.name} tells of no registers: {told[:200]}")
    return int(used[1]), int(used[2])


def main() -> int:
    """A line a kernel; 1 if one breaks a limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="every head size and dtype claimed")
    parser.add_argument("--only", action="append", default=[], help="kernels of this name")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    options = parser.parse_args()
    if triton_backend.INTERPRETED:
        sys.exit("TRITON_INTERPRET is set: the kernels are interpreted, not compiled")
    faulty = 0
    for shape in shapes(full=options.full):
        for kernel in compiled(shape, options.only):
            faulty += bool(kernel.faults)
            print(
                json.dumps({**asdict(kernel), "faults": kernel.faults}) if options.json else kernel
            )
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
