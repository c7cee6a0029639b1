"""`python -m tests.support.loading FOLDER DTYPE`: what a process holds while weights are read.

Prints the most bytes of its own that loading added on the way to a device, and on the way to
the host, as JSON. In a process of its own: an allocator keeps what others have freed.
"""

import json
import sys
from pathlib import Path

import torch

from noria.models.family import Parameter, Part
from worker.models import weights
from worker.models.safetensors_weights import SafetensorsWeights


def own_bytes() -> int:
    """Without pages of files, which go when somebody needs the memory."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line
    )
    return int(line.split()[1]) * 1024


class Touched(SafetensorsWeights):
    """Reads every page, as a copy to a device would."""

    def read(self, name):
        tensor = super().read(name)
        assert tensor.view(torch.uint8).view(-1)[::4096].any()
        return tensor


def added(folder: Path, dtype: torch.dtype, device: str) -> int:
    source = Touched(folder)
    parameters = [Parameter(name, (Part(name, shape),)) for name, shape in source.shapes().items()]
    before, most = own_bytes(), 0

    def progress(done, total):
        nonlocal most
        most = max(most, own_bytes() - before)

    loaded = weights.load_parameters(parameters, source, dtype, progress, torch.device(device))
    assert {tensor.device.type for tensor in loaded.values()} == {device}
    return most


def main(folder: str, dtype: str) -> None:
    # What has no content cannot be looked at.
    weights._check_finite = lambda parameter, whole: None
    kinds = {"device": "meta", "host": "cpu"}
    print(json.dumps({k: added(Path(folder), getattr(torch, dtype), d) for k, d in kinds.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
