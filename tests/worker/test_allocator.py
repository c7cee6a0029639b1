"""Memory that is freed stays with the process."""

import os
import subprocess
import sys

import pytest

# Prints the page faults of a round that makes and drops logits and what a sampler makes of
# them, before and after the rule.
FAULTS = """
import resource, torch
from worker.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        logits = torch.zeros(32, 49152)
        scaled = logits.clone()
        ranked = (scaled * 2).exp().sort(dim=1)
        del logits, scaled, ranked
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4

torch.set_num_threads(1)
faults()
before = faults()
kept = keep_freed_memory()
faults(), faults()
print(int(kept), before, faults())
"""


def test_a_step_pays_once_for_the_pages_of_its_tensors() -> None:
    """Where the allocator takes the rule, repeated large tensors cost hardly a page fault."""
    # Without this glibc adapts its rule to what the process happened to free before.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    out = subprocess.run(
        [sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True
    )
    kept, before, after = map(int, out.stdout.split())
    if not kept:
        pytest.skip("the C library has no mallopt")
    assert before > 1000
    assert after < before / 10
