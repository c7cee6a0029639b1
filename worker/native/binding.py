"""The C interface of `source/noria_cpu.h`: its structures, field by field, and its functions."""

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

_ERRORS = {
    1: "the kernels' threads belong to the process that this one was forked from",
    2: "a token id lies outside the vocabulary",
    3: "a slot or block lies outside the cache",
    4: "a length does not fit its block table, or is below what is computed",
}


class KernelError(ValueError):
    """A step that the kernels refused before they computed anything."""


class CacheStruct(Structure):
    """NoriaCache"""

    _fields_ = (
        ("data", c_void_p),
        ("groups", c_int64),
        ("groups_per_block", c_int32),
        ("layers", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
    )


class BatchStruct(Structure):
    """NoriaBatch"""

    _fields_ = (
        ("token_ids", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("kv_lens", c_void_p),
        ("block_table", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("positions", c_int32),
        ("sequences", c_int32),
        ("width", c_int32),
    )


class LinearStruct(Structure):
    """NoriaLinear"""

    _fields_ = (("packed", c_void_p), ("n", c_int32), ("k", c_int32))


class LayerStruct(Structure):
    """NoriaLayer"""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("window", c_int32),
    )


class ModelStruct(Structure):
    """NoriaModel"""

    _fields_ = (
        ("vocab", c_int32),
        ("hidden", c_int32),
        ("layers", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("inner", c_int32),
        ("embedding_is_packed", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", LinearStruct),
        ("layer", POINTER(LayerStruct)),
    )


_MODEL, _CACHE, _BATCH = POINTER(ModelStruct), POINTER(CacheStruct), POINTER(BatchStruct)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "noria_act_bytes": (c_int32, ()),
    "noria_start": (c_void_p, (c_int32,)),
    "noria_stop": (None, (c_void_p,)),
    "noria_step_bytes": (c_int64, (_MODEL, c_int32, c_int32)),
    "noria_step": (c_int32, (c_void_p, _MODEL, _CACHE, _BATCH, c_void_p, c_void_p)),
    "noria_logits": (c_int32, (c_void_p, _MODEL, c_void_p, c_int32, c_void_p)),
    "noria_attend_bytes": (c_int64, (_CACHE, c_int32, c_int32, c_int32)),
    "noria_write": (c_int32, (c_void_p, _CACHE, _BATCH, c_int32, c_void_p, c_void_p)),
    "noria_attend": (
        c_int32,
        (c_void_p, _CACHE, _BATCH, c_int32, c_int32, c_int32, c_float, *(c_void_p,) * 3),
    ),
    "noria_huge_pages": (None, (c_void_p, c_int64)),
}


def load_library(path: Path) -> ctypes.CDLL:
    """Raises OSError for a file that is no library, AttributeError for another's."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def check(code: int) -> None:
    """Raises KernelError unless the code means success."""
    if code:
        raise KernelError(_ERRORS[code])


def address(tensor: torch.Tensor | None) -> int | None:
    """Where a contiguous tensor lies. Its owner keeps it as long as the address is used."""
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")
    return tensor.data_ptr()


__all__ = [
    "BatchStruct", "CacheStruct", "KernelError", "LayerStruct", "LinearStruct", "ModelStruct",
    "address", "byref", "check", "load_library",
]  # fmt: skip
