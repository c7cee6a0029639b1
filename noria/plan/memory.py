"""How much memory this process may still take: the computer's, within its control group's limit."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Written by version 1 where there is no limit: the largest multiple of a page in 63 bits.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. `limit` names what bounds `available`."""

    total: int
    available: int
    limit: str


def host_memory(root: Path = Path("/")) -> HostMemory:
    """What the computer has and what of it is free, in bytes.

    Free is the least of MemAvailable and of what every control group above this process
    (version 2 or 1) has left; a group's inactive file pages count as free, since the kernel
    drops them first. Elsewhere than on Linux all physical memory counts as free.
    """
    memory = _of_computer(root)
    for limit, used, path in _control_groups(root):
        if limit < memory.total:
            memory = HostMemory(limit, memory.available, memory.limit)
        if limit - used < memory.available:
            memory = HostMemory(memory.total, max(0, limit - used), f"control group {path}")
    return memory


def _of_computer(root: Path) -> HostMemory:
    values = _pairs(root / "proc/meminfo", unit=1024)
    if "MemTotal" in values:
        total = values["MemTotal"]
        return HostMemory(total, values.get("MemAvailable", total), "MemAvailable")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HostMemory(total, total, "physical memory")


def _control_groups(root: Path) -> Iterator[tuple[int, int, str]]:
    """(limit, bytes in use that cannot be dropped, path) of each group that has a limit."""
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            names = (base, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = (
                *(base / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
                "total_inactive_file",
            )
        else:
            continue
        yield from _limits(path, *names)


def _limits(
    path: str, base: Path, limit_file: str, usage_file: str, droppable: str
) -> Iterator[tuple[int, int, str]]:
    """From the process's own group up to the root, which in a container is its own."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = base.joinpath(*parts[:depth])
        limit, usage = _text(folder / limit_file).strip(), _text(folder / usage_file).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < _NO_LIMIT:
            dropped = _pairs(folder / "memory.stat").get(droppable, 0)
            yield int(limit), int(usage) - dropped, "/" + "/".join(parts[:depth])


def _pairs(path: Path, unit: int = 1) -> dict[str, int]:
    """Lines of a name and a number."""
    words = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {w[0]: int(w[1]) * unit for w in words if len(w) >= 2 and w[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError):
        return ""
