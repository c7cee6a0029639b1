"""The `noria` command."""

import os

# gRPC reads this when it is loaded; its notes on closed connections would stand among answers.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
