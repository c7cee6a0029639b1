"""The loaded kernels with their threads."""

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from worker.native.binding import (
    BatchStruct,
    CacheStruct,
    ModelStruct,
    address,
    byref,
    check,
    load_library,
)
from worker.native.library import (
    BuildError,
    Compiler,
    KernelCache,
    find_compiler,
    installed_kernels,
    kernels_dir,
    writable_cache,
)
from worker.native.variants import CPU, Variant, choose_variant, this_cpu

__all__ = ["Kernels", "load_kernels"]


class Kernels:
    """Functions of one built variant, and `threads` threads, the caller's own among them.

    Call from one thread at a time. Tensors must be contiguous and of the types that
    noria_cpu.h states; `activations` is that of hidden states and queries.
    """

    def __init__(self, library: ctypes.CDLL, variant: Variant, threads: int) -> None:
        """Raises MemoryError without room for the threads."""
        self._library, self.variant, self.threads = library, variant, threads
        self.activations: torch.dtype = getattr(torch, variant.activations)
        self._workers = library.noria_start(threads)
        if not self._workers:
            raise MemoryError(f"no room for {threads} threads")
        weakref.finalize(self, library.noria_stop, self._workers)
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def step(
        self, model: ModelStruct, cache: CacheStruct, batch: BatchStruct, hidden: torch.Tensor
    ) -> None:
        """Compute a step into hidden [T, hidden_size]. Raises KernelError before computing."""
        size = self._library.noria_step_bytes(byref(model), batch.positions, self.threads)
        workspace = self._room(size)
        structures = byref(model), byref(cache), byref(batch)
        check(self._library.noria_step(self._workers, *structures, workspace, address(hidden)))

    def logits(self, model: ModelStruct, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """hidden [S, hidden_size] -> logits fp32 [S, vocab_size]."""
        rows = hidden.shape[0]
        arguments = byref(model), address(hidden), rows, address(logits)
        check(self._library.noria_logits(self._workers, *arguments))

    def write(
        self,
        cache: CacheStruct,
        batch: BatchStruct,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """key and value bf16 [T, num_kv_heads, head_dim]."""
        arguments = byref(cache), byref(batch), layer, address(key), address(value)
        check(self._library.noria_write(self._workers, *arguments))

    def attend(
        self,
        cache: CacheStruct,
        batch: BatchStruct,
        layer: int,
        window: int,
        scale: float,
        query: torch.Tensor,
        attended: torch.Tensor,
    ) -> None:
        """query and attended [T, num_heads, head_dim]; window 0 is none."""
        heads, positions = query.shape[1], batch.positions
        size = self._library.noria_attend_bytes(byref(cache), heads, positions, self.threads)
        arguments = (
            *(byref(cache), byref(batch), layer, heads, window, scale),
            *(address(query), self._room(size), address(attended)),
        )
        check(self._library.noria_attend(self._workers, *arguments))

    def prefer_huge_pages(self, tensor: torch.Tensor) -> None:
        """For memory that nothing has been written to."""
        self._library.noria_huge_pages(address(tensor), tensor.numel() * tensor.itemsize)

    def _room(self, size: int) -> int:
        """The address of at least `size` bytes, aligned to cache lines."""
        if size + 63 > self._workspace.numel():
            self._workspace = torch.empty(size + 63, dtype=torch.uint8)
        return (self._workspace.data_ptr() + 63) // 64 * 64


def load_kernels(
    name: str,
    threads: int,
    on_build: Callable[[], None] = lambda: None,
    *,
    cpu: CPU | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Kernels:
    """The kernels of the named variant, `auto` for the fastest; built if they are not yet.

    `on_build` is called before a build, which takes seconds. `folder` keeps the builds; those
    that were installed with Noria need none.
    Raises UnsupportedCPUError, BuildError or MemoryError with the reason.
    """
    variant = choose_variant(name, cpu or this_cpu())
    with writable_cache(folder or kernels_dir(environment)) as cache:
        return Kernels(_loaded(cache, variant, environment, on_build), variant, threads)


def _loaded(
    cache: KernelCache,
    variant: Variant,
    environment: Mapping[str, str],
    on_build: Callable[[], None],
) -> ctypes.CDLL:
    compiler, missing = _compiler(environment)
    for place in (cache, installed_kernels()):
        found = place.find(variant, compiler if place is cache else None)
        if found is not None:
            # What is cut off or overwritten is built again.
            with contextlib.suppress(OSError, AttributeError):
                return load_library(found)
    if compiler is None:
        raise BuildError(missing)
    on_build()
    try:
        return load_library(cache.build(variant, compiler))
    except (OSError, AttributeError) as error:
        raise BuildError(f"the built kernels cannot be loaded: {error}") from error


def _compiler(environment: Mapping[str, str]) -> tuple[Compiler | None, str]:
    try:
        return find_compiler(environment), ""
    except BuildError as error:
        return None, str(error)
