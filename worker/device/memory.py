"""What a device's memory goes to, as measured, and what is left for keys and values."""

from dataclasses import dataclass
from typing import Protocol

import torch

from noria.plan.units import exact_bytes
from worker.sizing import Budget


class MemoryMeter(Protocol):
    """Bytes of one device."""

    def total(self) -> int: ...

    def free(self) -> int:
        """What nobody holds: no other process, and no allocator for later."""
        ...

    def watch(self) -> int:
        """What tensors of this process hold now; `peak` counts from here on."""
        ...

    def peak(self) -> int:
        """The most that they have held since `watch`."""
        ...

    def give_back(self) -> None:
        """Let go of what an allocator keeps for later."""
        ...


class CudaMeter:
    """Of torch's allocator and the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def watch(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def give_back(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes: `held` by everybody once the weights are there, others on the device included;
    on top of that `activations` of the largest step, and `graphs`.
    """

    total: int
    held: int
    activations: int
    graphs: int

    @property
    def needed(self) -> int:
        return self.held + self.activations + self.graphs


def device_budget(given: int | None, utilization: float, usage: Usage) -> Budget:
    """Keys and values get what a share of the device's memory leaves, or what is `given`.

    Raises ValueError with both sizes where that is nothing, or more than there is.
    """
    most = usage.total - usage.needed
    if given is not None:
        if given > most:
            raise ValueError(
                f"kv_cache_memory_bytes {given:,} exceeds the {most:,} bytes that weights, "
                f"activations and graphs leave of the device's {usage.total:,}"
            )
        return Budget(given, f"kv_cache_memory_bytes = {exact_bytes(given)}", most)
    share = int(usage.total * utilization)
    if share <= usage.needed:
        raise ValueError(
            f"gpu_memory_utilization {utilization:g} of {usage.total:,} bytes is {share:,}; "
            f"without keys and values {usage.needed:,} are needed: {_told(usage)}"
        )
    left = share - usage.needed
    reason = f"{usage.total:,} bytes x {utilization:g} - {_told(usage)} = {exact_bytes(left)}"
    return Budget(left, reason, most)


def _told(usage: Usage) -> str:
    return (
        f"({usage.held:,} held after loading + {usage.activations:,} of the largest step + "
        f"{usage.graphs:,} of graphs)"
    )
