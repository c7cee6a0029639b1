"""Finds what would make the host wait for a device, where there is none.

`NoSync` stops at operations that hand a tensor's content to the host. On tensors that a
`FakeTensorMode` gives out as CUDA's it also sees copies between host and device that block.
What depends on data in no other way has no shape there, and fails by itself.
"""

import contextlib

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

READING = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_dim",
}
COPIES = {"aten::_to_copy", "aten::copy_"}


class HostSyncError(AssertionError):
    pass


class NoSync(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name
        if name in READING:
            raise HostSyncError(name)
        if name.startswith("aten::index") and _has_mask(args):
            raise HostSyncError(f"{name} by a mask")
        result = function(*args, **kwargs)
        if name in COPIES and _blocks(name, args, kwargs, result):
            raise HostSyncError(f"{name} that blocks")
        return result


def _has_mask(args):
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    kinds = (torch.bool, torch.uint8)
    return any(isinstance(i, torch.Tensor) and i.dtype in kinds for i in indices)


def _blocks(name, args, kwargs, result):
    source = args[1] if name == "aten::copy_" else args[0]
    given = kwargs.get("non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False)
    return source.device.type != result.device.type and not given


class FakeCudaLink:
    """A link to a CUDA device that exists in a FakeTensorMode alone."""

    device = torch.device("cuda")

    def staging(self, num_bytes):
        with contextlib.suppress(RuntimeError), torch._C._DisableTorchDispatch():
            return torch.empty(num_bytes, dtype=torch.uint8)
        raise AssertionError("no memory")

    def upload(self, values):
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)

    def download(self, values):
        return values.to("cpu", non_blocking=True)

    def mark(self):
        return self

    def wait(self):
        pass


@contextlib.contextmanager
def fake_cuda():
    """Tensors made on "cuda" have shapes and no content; those of the host are taken in."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
