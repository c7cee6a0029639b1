"""The tokenizer service: text into ids, and ids into text."""

import os

# Read when gRPC is loaded. Below this it writes lines of its own among the service's, one for
# each stranger whose handshake fails.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
