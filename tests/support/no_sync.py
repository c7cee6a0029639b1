"""Finds what would make the host wait for a device, where there is none.

`NoSync` stops at operations that hand a tensor's content to the host. On tensors that a
`FakeTensorMode` gives out as CUDA's it also sees copies between host and device that block.
What depends on data in no other way has no shape there, and fails by itself.
"""

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

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
        # In inference mode what is made of other operations arrives whole.
        if function.namespace == "aten":
            with self:
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
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
    given = kwargs.get(
        "non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False
    )
    return source.device.type != result.device.type and not given


class _Indexing(TorchFunctionMode):
    """What needs a device guard, which only a build with CUDA has, without one."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            if not isinstance(args[0], FakeTensor):
                with unset_fake_temporarily():
                    return function(*args)
            plain, masks = _basic(*args)
            return aten.index.Tensor(plain, masks) if masks else plain
        if function is torch.Tensor.__setitem__:
            into, at, value = args
            plain, masks = _basic(into, at)
            value = value if isinstance(value, torch.Tensor) else into.new_full((), value)
            return (
                aten.index_put_(plain, masks, value) if masks else aten.copy_.default(plain, value)
            )
        if function is torch.Tensor.copy_:
            into, source = args
            return aten.copy_.default(into, _contentless(source), **(kwargs or {}))
        if function is scaled_dot_product_attention:
            query, key, value = args
            mask = kwargs.pop("attn_mask", None)
            return aten._scaled_dot_product_attention_math(query, key, value, mask, **kwargs)[0]
        if function in _DIRECT:
            return _DIRECT[function](*args)
        return function(*args, **(kwargs or {}))


def _read(tensor):
    return aten._local_scalar_dense.default(tensor.flatten())


_DIRECT = {
    torch.Tensor.__bool__: _read,
    torch.Tensor.__invert__: aten.bitwise_not.default,
    torch.Tensor.cpu: lambda tensor: aten._to_copy.default(tensor, device=torch.device("cpu")),
    torch.Tensor.item: _read,
    torch.Tensor.nonzero: aten.nonzero.default,
    torch.Tensor.tolist: _read,
}


def _contentless(tensor):
    if isinstance(tensor, FakeTensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _basic(tensor, at):
    """The tensor by integers, slices and None, and indices by tensors that are left."""
    dim, left = 0, []
    at = list(at) if isinstance(at, tuple) else [at]
    if any(one is Ellipsis for one in at):
        place = next(i for i, one in enumerate(at) if one is Ellipsis)
        at[place : place + 1] = [slice(None)] * (tensor.dim() - len(at) + 1)
    for one in at:
        if one is None:
            tensor = aten.unsqueeze(tensor, dim)
        elif isinstance(one, int):
            tensor = aten.select.int(tensor, dim, one)
            continue
        elif isinstance(one, slice):
            end = 2**62 if one.stop is None else one.stop
            tensor = aten.slice.Tensor(tensor, dim, one.start or 0, end, one.step or 1)
        else:
            left += [None] * (dim - len(left)) + [one]
            dim += one.dim() - 1 if one.dtype is torch.bool else 0
        dim += 1
    return tensor, left


class FakeCudaLink:
    """A link to a CUDA device that exists in a FakeTensorMode alone."""

    device = torch.device("cuda")

    def staging(self, num_bytes):
        with unset_fake_temporarily():
            return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, values):
        dtype = torch.from_numpy(values[:0]).dtype
        return torch.empty(values.shape, dtype=dtype, device=self.device)

    def download(self, values):
        return torch.empty(values.shape, dtype=values.dtype)

    def mark(self):
        return self

    def wait(self):
        pass


@contextlib.contextmanager
def fake_cuda():
    """Tensors made on "cuda" have shapes and no content; those of the host are taken in."""
    with FakeTensorMode(allow_non_fake_inputs=True), _Indexing():
        yield
