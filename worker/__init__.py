"""The worker: ids in, ids out."""

import os

# Read when torch loads OpenMP. Its threads share their cores with the kernels' own and with
# other processes: those that spin while they wait keep off whom they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Read when gRPC is loaded. Below this it writes lines of its own among the service's, one for
# each stranger whose handshake fails.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
