"""Accelerators that can be named: memory, bandwidth, arithmetic."""

from dataclasses import dataclass

from noria.plan.memory import HostMemory

_GIB = 2**30
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator, or this computer.

    memory      bytes that the driver reports
    bandwidth   bytes/s of its memory, None if unknown
    flops       dense bf16 operations/s, None if unknown
    """

    name: str
    memory: int
    bandwidth: float | None = None
    flops: float | None = None
    is_host: bool = False


def _card(name: str, mebibytes: int, gb_per_s: float, tflops: float) -> Card:
    return Card(name, mebibytes * 2**20, gb_per_s * 1e9, tflops * 1e12)


# Memory as the driver reports it, which is less than the box says (error correction takes a
# sixteenth of GDDR6). Bandwidth and dense bf16 (half of the figures "with sparsity") are from
# the makers' data sheets; B200's bandwidth from its bus, 7,680 bits at 2 x 3,996 MHz.
CARDS = {
    "h100": _card("H100 SXM 80 GB", 81_559, 3_350, 989),
    "h100-pcie": _card("H100 PCIe 80 GB", 81_559, 2_000, 756),
    "h100-nvl": _card("H100 NVL 94 GB", 95_830, 3_900, 835),
    "h200": _card("H200 SXM 141 GB", 143_771, 4_800, 989),
    "b200": _card("B200 180 GB", 183_359, 7_672, 2_250),
    "a100-80gb": _card("A100 SXM 80 GB", 81_920, 2_039, 312),
    "a100-40gb": _card("A100 SXM 40 GB", 40_960, 1_555, 312),
    "l40s": _card("L40S 48 GB", 46_068, 864, 362),
    "l4": _card("L4 24 GB", 23_034, 300, 121),
    "a10": _card("A10 24 GB", 23_028, 600, 125),
    "rtx-4090": _card("RTX 4090 24 GB", 24_564, 1_008, 165),
}


def named_card(name: str) -> Card:
    """Raises ValueError with the names that are known."""
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    if key not in CARDS:
        known = ", ".join((CPU, *CARDS))
        raise ValueError(f"card {name!r} is not known (known: {known}); give --memory instead")
    return CARDS[key]


def this_computer(memory: HostMemory) -> Card:
    """What a worker started now would find free."""
    return Card(f"this computer ({memory.total / _GIB:.1f} GiB)", memory.available, is_host=True)
