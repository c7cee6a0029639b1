"""How the C library's allocator treats the large tensors that a step makes and drops."""

import ctypes

# From malloc.h of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# The largest value that glibc takes: `HEAP_MAX_SIZE / 2` of a 64-bit system.
_MMAP_THRESHOLD = 32 * 1024**2
_TRIM_THRESHOLD = 1024**3


def keep_freed_memory() -> bool:
    """Memory that a step frees stays with the process, for the next step: up to 1 GiB.

    Otherwise the logits and what a sampler makes of them go back to the system, and every
    step pays anew for each of their pages (4 KiB) when it is first written to. Tells whether
    it took effect: other C libraries have other rules.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, _MMAP_THRESHOLD), (_M_TRIM_THRESHOLD, _TRIM_THRESHOLD))
    taken: int = sum(mallopt(name, value) for name, value in settings)
    return taken == len(settings)
