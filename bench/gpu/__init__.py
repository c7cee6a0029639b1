"""What proves and measures a worker on a GPU: torch, triton, numpy, safetensors, no more."""
