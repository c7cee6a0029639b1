"""Which instruction sets the kernels are written for, and what this CPU has."""

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


VARIANTS = (
    _variant("avx512_bf16", (*_AVX512, "avx512_bf16"), "bfloat16"),
    _variant("avx512", _AVX512, "float32"),
    _variant("avx2", _AVX2, "float32"),
)
VARIANT_NAMES = tuple(variant.name for variant in VARIANTS)


class UnsupportedCPUError(Exception):
    """The CPU lacks what the kernels need; the message says what."""


@dataclass(frozen=True, slots=True)
class CPU:
    """What /proc/cpuinfo says: the maker, and Linux' names of the features."""

    vendor: str = ""
    features: frozenset[str] = frozenset()

    @property
    def fastest_first(self) -> tuple[Variant, ...]:
        """Intel's cores multiply pairs of bf16 at half the rate of fp32, AMD's at twice it."""
        with_bf16, *others = VARIANTS
        return (*others, with_bf16) if self.vendor == "GenuineIntel" else VARIANTS


def this_cpu(cpuinfo: Path = _CPUINFO) -> CPU:
    """Nothing is known of a CPU that does not describe itself there."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return CPU()
    fields = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    return CPU(fields.get("vendor_id", ""), frozenset(fields.get("flags", "").split()))


def choose_variant(name: str, cpu: CPU) -> Variant:
    """The variant of that name, or for `auto` the fastest. Raises UnsupportedCPUError."""
    candidates = [v for v in cpu.fastest_first if name in ("auto", v.name)]
    for variant in candidates:
        if cpu.features.issuperset(variant.features):
            return variant
    easiest = min(candidates, key=lambda variant: len(variant.features))
    lacking = [feature for feature in easiest.features if feature not in cpu.features]
    raise UnsupportedCPUError(f"the CPU has no {', '.join(lacking)}")
