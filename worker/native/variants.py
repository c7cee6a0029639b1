"""Which instruction sets the kernels are written for, and what this CPU has."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_AVX2 = ("avx2", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")


@dataclass(frozen=True, slots=True)
class Variant:
    """One build of the kernels. `features` are Linux' names of what the CPU must have.

    `activations` is the torch dtype of what is multiplied with bf16 weights.
    """

    name: str
    features: tuple[str, ...]
    activations: str
    options: tuple[str, ...]


def _variant(name: str, features: tuple[str, ...], activations: str) -> Variant:
    # Named one by one, not by -march: a build serves every CPU that has them.
    enabled = (f"-m{feature.replace('_', '')}" for feature in features)
    return Variant(name, features, activations, (*enabled, f"-DNORIA_{name.upper()}"))


# Fastest first.
VARIANTS = (
    _variant("avx512_bf16", (*_AVX512, "avx512_bf16"), "bfloat16"),
    _variant("avx512", _AVX512, "float32"),
    _variant("avx2", _AVX2, "float32"),
)
VARIANT_NAMES = tuple(variant.name for variant in VARIANTS)


class UnsupportedCPUError(Exception):
    """The CPU lacks what the kernels need; the message says what."""


def cpu_features(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Linux' names of this CPU's features; empty where they cannot be told."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(flags, "").split())


def choose_variant(name: str, features: Iterable[str]) -> Variant:
    """The variant of that name, or for `auto` the fastest. Raises UnsupportedCPUError."""
    present = frozenset(features)
    candidates = [variant for variant in VARIANTS if name in ("auto", variant.name)]
    for variant in candidates:
        if present.issuperset(variant.features):
            return variant
    lacking = [feature for feature in candidates[-1].features if feature not in present]
    raise UnsupportedCPUError(f"the CPU has no {', '.join(lacking)}")
