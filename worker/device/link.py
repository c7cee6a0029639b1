"""What goes between host and device, without either waiting."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Mark(Protocol):
    """A place in the device's queue of work."""

    def wait(self) -> None:
        """Block the host until everything before it is done."""
        ...


class Link(Protocol):
    """The way to one device and back. All of it happens in the order of the calls."""

    device: torch.device

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Host memory, uint8 [num_bytes], from which copies need not wait."""
        ...

    def upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """The values on the device."""
        ...

    def download(self, values: torch.Tensor) -> torch.Tensor:
        """Host memory that holds the values once a later mark has been waited for."""
        ...

    def mark(self) -> Mark: ...


class HostLink:
    """The device is the host: everything is done when a call returns."""

    device = torch.device("cpu")

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values))

    def download(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def mark(self) -> "HostLink":
        return self

    def wait(self) -> None:
        pass


class CudaLink:
    """Copies on the current stream, through pinned memory.

    Memory that `upload` and `download` pin comes from torch's caching allocator, which gives
    it to nobody else before the copies that were queued have run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        pinned = torch.from_numpy(np.ascontiguousarray(values)).pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def download(self, values: torch.Tensor) -> torch.Tensor:
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return pinned.copy_(values, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return _Event(event)


class _Event:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
