"""Steps for attention backends on a CPU: batches over permuted blocks."""

from bench.gpu import conformance
from bench.gpu.conformance import CPU, NAN, NUM_BLOCKS, STEPS, planned


def write(spec, metadata, *backends):
    """The same random K and V of all layers into each of the backends."""
    conformance.write(spec, metadata, CPU, *backends)


__all__ = ["NAN", "NUM_BLOCKS", "STEPS", "planned", "write"]
