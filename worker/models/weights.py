"""From tensors as a checkpoint holds them to tensors as a model uses them."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from noria.models.family import Parameter

Progress = Callable[[int, int], None]
HOST = torch.device("cpu")
Shape = tuple[int, ...]
_MAX_READERS = 8
_MAX_NAMED = 5


def silent(done: int, total: int) -> None:
    """A Progress that tells nobody."""
    del done, total


class WeightsError(ValueError):
    """The checkpoint does not hold what the model's config describes."""


class WeightSource(Protocol):
    """A checkpoint's tensors under their Hugging Face names."""

    def shapes(self) -> dict[str, Shape]: ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in any float dtype. Several threads may read at once."""
        ...


def load_parameters(
    parameters: list[Parameter],
    source: WeightSource,
    dtype: torch.dtype,
    progress: Progress,
    device: torch.device = HOST,
) -> dict[str, torch.Tensor]:
    """Parameter name -> tensor of `dtype` on the device.

    `progress` gets (tensors read, tensors in all).
    Raises WeightsError, before anything is read, if a tensor is missing, surplus or of
    another shape; while reading, for one that is not finite. Tensors are read ahead by
    threads; only the caller's thread runs torch.
    """
    check_shapes(expected_shapes(parameters), source.shapes())
    names = [part.name for parameter in parameters for part in parameter.parts]
    loaded: dict[str, torch.Tensor] = {}
    progress(0, len(names))
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_READERS)) as readers:
        tensors = _read_ahead(readers, source.read, names)
        done = 0
        for parameter in parameters:
            loaded[parameter.name] = whole = _joined(parameter, tensors, dtype, device)
            _check_finite(parameter, whole)
            done += len(parameter.parts)
            progress(done, len(names))
    return loaded


def expected_shapes(parameters: list[Parameter]) -> dict[str, Shape]:
    return {part.name: part.shape for parameter in parameters for part in parameter.parts}


def check_shapes(expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    """Raises WeightsError naming the tensors and, where they differ, both shapes."""
    missing = [name for name in expected if name not in found]
    surplus = [name for name in found if name not in expected]
    differing = [
        f"{name} is {found[name]}, the config asks for {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    faults = [
        f"{kind}: {first_few(names)}"
        for kind, names in (("missing", missing), ("surplus", surplus), ("shape", differing))
        if names
    ]
    if faults:
        raise WeightsError("weights do not fit the config: " + "; ".join(faults))


def first_few(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _joined(
    parameter: Parameter,
    tensors: Iterator[torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A `from_one` parameter stays fp32: near one, narrow dtypes would round its difference."""
    kept = torch.float32 if parameter.from_one else dtype
    whole = torch.empty(parameter.shape, dtype=kept, device=device)
    start = 0
    for part in parameter.parts:
        whole[start : start + part.shape[0]].copy_(next(tensors))
        start += part.shape[0]
    return whole.add_(1.0) if parameter.from_one else whole


def _check_finite(parameter: Parameter, whole: torch.Tensor) -> None:
    """One such number in a matrix makes every token's logits worthless."""
    if not all(bound.isfinite() for bound in torch.aminmax(whole)):
        names = ", ".join(part.name for part in parameter.parts)
        kind = str(whole.dtype).removeprefix("torch.")
        raise WeightsError(f"the weights hold NaN or infinity in {names} (as {kind})")


def _read_ahead(
    readers: ThreadPoolExecutor, read: Callable[[str], torch.Tensor], names: Iterable[str]
) -> Iterator[torch.Tensor]:
    """Tensors in order; a few are in flight, so that memory stays near the model's own size."""
    pending: deque[Future[torch.Tensor]] = deque()
    for name in names:
        pending.append(readers.submit(read, name))
        if len(pending) > 2 * _MAX_READERS:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
