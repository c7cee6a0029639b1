"""Which attention backend a GPU gets: the first that can compute the model, or the one asked for.

A backend is tried by what it needs: a module, a kind of GPU, a dtype, a head size, a block size.
Each that is passed over says why.
"""

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from worker.attention.base import AttentionBackend
from worker.attention.flash import (
    FlashAttention2Backend,
    FlashAttention3Backend,
    TorchVarlenBackend,
    flash_limits,
)
from worker.attention.padded import PaddedBackend
from worker.attention.torch_backend import TorchBackend

_FLASH_2_FROM, _FLASH_2_BELOW = (2, 8, 3), (2, 8, 4)
_TRITON_FROM = (3, 6)
_FLASH_3_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")


@dataclass(frozen=True, slots=True)
class Demand:
    """What a model asks of attention. `block_size` is the one that was set, if one was."""

    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Where attention runs: the device, its compute capability (None: no CUDA), its modules.

    `module` imports one and raises ImportError; `installed` is a package's version, None
    without one; `missing` tells what Triton lacks to build what launches its kernels.
    """

    device: torch.device
    capability: tuple[int, int] | None
    module: Callable[[str], Any] = import_module
    installed: Callable[[str], str | None] = field(default=lambda name: _installed(name))
    missing: Callable[[], str] = field(default=lambda: _missing_for_launchers())

    @classmethod
    def of(cls, device: torch.device) -> "Machine":
        """As torch tells of the device. Raises RuntimeError for one that is not there."""
        is_cuda = device.type == "cuda"
        return cls(device, torch.cuda.get_device_capability(device) if is_cuda else None)


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend, and for each that was tried before it why it was passed over."""

    backend: AttentionBackend
    passed_over: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """`against` gives reasons why it cannot run; `make` may be called if there are none."""

    name: str
    against: Callable[[Demand, Machine], Iterator[str]]
    make: Callable[[Machine], AttentionBackend]


def choose(asked: str, demand: Demand, machine: Machine) -> Choice:
    """`asked` is a backend's name or "auto".

    Raises ValueError with every reason if the one that was asked for cannot run.
    """
    passed_over: list[str] = []
    for candidate in CANDIDATES:
        if asked not in ("auto", candidate.name):
            continue
        reasons = list(candidate.against(demand, machine))
        if not reasons:
            return Choice(candidate.make(machine), tuple(passed_over))
        passed_over.append(f"{candidate.name}: {'; '.join(reasons)}")
    if asked == "auto":
        raise ValueError(f"no attention backend can be used: {' | '.join(passed_over)}")
    told = passed_over[0].removeprefix(f"{asked}: ") if passed_over else "it is not known here"
    raise ValueError(f"attention_backend {asked} cannot be used: {told}")


def _against_flash_3(demand: Demand, machine: Machine) -> Iterator[str]:
    if machine.capability is None:
        yield _NO_CUDA
    elif machine.capability[0] != 9:
        yield f"compute capability {_told(machine.capability)}; it needs 9.0 (Hopper)"
    if _flash_3(machine) is None:
        yield f"no module {' or '.join(_FLASH_3_MODULES)} has flash_attn_with_kvcache"
    yield from flash_limits(demand.head_dim, demand.dtype)


def _flash_3(machine: Machine) -> Any:
    for name in _FLASH_3_MODULES:
        function = _function(machine, name, "flash_attn_with_kvcache")
        if function is not None and "page_table" in signature(function).parameters:
            return function
    return None


def _against_triton(demand: Demand, machine: Machine) -> Iterator[str]:
    found = machine.installed("triton")
    if found is None:
        yield "triton is not installed"
        return
    if _numbers(found) < _TRITON_FROM:
        yield f"triton {found} is installed; it needs {_dotted(_TRITON_FROM)} or later"
        return
    backend = machine.module("worker.attention.triton_backend")
    if machine.capability is None and not backend.INTERPRETED:
        yield f"{_NO_CUDA}, and the kernels are not interpreted (TRITON_INTERPRET=1)"
    elif machine.capability is not None and machine.capability[0] < 8:
        yield f"compute capability {_told(machine.capability)}; it needs 8.0 or later"
    elif machine.capability is not None and (missing := machine.missing()):
        yield missing
    yield from backend.limits(demand.head_dim, demand.dtype)
    yield from _against_block_size(demand, backend.BLOCK_MULTIPLE)


def _against_flash_2(demand: Demand, machine: Machine) -> Iterator[str]:
    found = machine.installed("flash-attn")
    if found is None:
        yield "flash-attn is not installed"
    elif not _FLASH_2_FROM <= _numbers(found) < _FLASH_2_BELOW:
        yield (
            f"flash-attn {found} is installed; it needs {_dotted(_FLASH_2_FROM)} or later, "
            f"below {_dotted(_FLASH_2_BELOW)}"
        )
    elif _function(machine, "flash_attn", "flash_attn_varlen_func") is None:
        yield "flash_attn cannot be imported, or lacks flash_attn_varlen_func"
    yield from _against_ampere_kernels(demand, machine)


def _against_torch_varlen(demand: Demand, machine: Machine) -> Iterator[str]:
    if machine.capability is None:
        # The module takes seconds to import.
        yield from _against_ampere_kernels(demand, machine)
        return
    function = _function(machine, "torch.nn.attention.varlen", "varlen_attn")
    needed = ("block_table", "seqused_k", "num_splits", "enable_gqa")
    known = () if function is None else signature(function).parameters
    missing = [name for name in needed if name not in known]
    if missing:
        yield f"torch {torch.__version__} has no varlen_attn with {', '.join(missing)}"
    yield from _against_ampere_kernels(demand, machine)


def _against_ampere_kernels(demand: Demand, machine: Machine) -> Iterator[str]:
    """FlashAttention 2's, whoever brings them."""
    if machine.capability is None:
        yield _NO_CUDA
    elif machine.capability[0] < 8:
        yield f"compute capability {_told(machine.capability)}; it needs 8.0 or later"
    yield from flash_limits(demand.head_dim, demand.dtype)
    yield from _against_block_size(demand, FlashAttention2Backend.block_multiple)


def _against_padded(demand: Demand, machine: Machine) -> Iterator[str]:
    del demand
    if machine.capability is None:
        yield f"{_NO_CUDA}, and without one torch reads no more than it needs"


def _against_torch(demand: Demand, machine: Machine) -> Iterator[str]:
    del demand
    if machine.capability is not None:
        yield "it gathers keys on the host; it runs on a CPU alone"


def _against_block_size(demand: Demand, multiple: int) -> Iterator[str]:
    if demand.block_size is not None and demand.block_size % multiple:
        yield f"block_size {demand.block_size} is no multiple of {multiple}"


def _triton(machine: Machine) -> AttentionBackend:
    backend: AttentionBackend = machine.module("worker.attention.triton_backend").TritonBackend(
        machine.device
    )
    return backend


def _function(machine: Machine, module: str, name: str) -> Any:
    """None without it: a module that was built for another torch fails in any way it likes."""
    try:
        return getattr(machine.module(module), name, None)
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None


def _missing_for_launchers() -> str:
    """Triton compiles a little C against Python's headers when a kernel is first launched."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler (CC, else gcc or clang), and there is none"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return "" if header.exists() else f"triton needs Python's headers, and there is no {header}"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(found: str) -> tuple[int, ...]:
    """The release of a version: 2.8.3.post2 -> (2, 8, 3)."""
    release = []
    for part in found.split("+")[0].split("."):
        if not part.isdigit():
            break
        release.append(int(part))
    return tuple(release)[:3]


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _told(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


_NO_CUDA = "the device is no CUDA device"
# From the fastest that is known on.
CANDIDATES = (
    _Candidate(
        "flash_attn_3",
        _against_flash_3,
        lambda machine: FlashAttention3Backend(machine.device, _flash_3(machine)),
    ),
    _Candidate("triton", _against_triton, _triton),
    _Candidate(
        "flash_attn_2",
        _against_flash_2,
        lambda machine: FlashAttention2Backend(
            machine.device, machine.module("flash_attn").flash_attn_varlen_func
        ),
    ),
    _Candidate(
        "torch_varlen",
        _against_torch_varlen,
        lambda machine: TorchVarlenBackend(
            machine.device, machine.module("torch.nn.attention.varlen").varlen_attn
        ),
    ),
    _Candidate("torch_padded", _against_padded, lambda machine: PaddedBackend(machine.device)),
    _Candidate("torch", _against_torch, lambda machine: TorchBackend()),
)
GPU_BACKENDS = tuple(candidate.name for candidate in CANDIDATES)
