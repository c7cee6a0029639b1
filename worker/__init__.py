"""The worker: ids in, ids out."""

import os

# Read when torch loads OpenMP. Its threads share their cores with the kernels' own and with
# other processes: those that spin while they wait keep off whom they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
