"""The native kernels for tests: each variant that this CPU runs, built once."""

from functools import cache

import pytest

from worker.native.kernels import Kernels, load_kernels
from worker.native.variants import VARIANT_NAMES, UnsupportedCPUError


@cache
def kernels(variant: str, threads: int = 2) -> Kernels:
    """Skips the test where the CPU lacks what the variant needs."""
    try:
        return load_kernels(variant, threads)
    except UnsupportedCPUError as error:
        pytest.skip(f"{variant}: {error}")


__all__ = ["VARIANT_NAMES", "kernels"]
