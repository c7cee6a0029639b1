"""Read a GGUF file: metadata, and where each tensor's bytes lie.

The format is llama.cpp's (ggml `docs/gguf.md`, versions 2 and 3, little endian).
The `gguf` package reads it too, and takes three seconds on a vocabulary of 49,152
tokens; a service has to be ready in about that time, so the header is read here
and only dequantisation is left to the package.
"""

import mmap
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
# GGUF value type -> struct layout.
_SCALARS = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), (f"<{c}" for c in "BbHhIif?Qqd"), strict=True)
)
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20


class GGUFError(ValueError):
    """The file is not a GGUF file that can be read; the message says where it is wrong."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's place in the file. `shape` is row-major (outermost first), as in torch."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True)
class GGUFFile:
    """A memory-mapped GGUF file. `data` is the whole file; tensor offsets point into it."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: memoryview = field(repr=False)

    def architecture_value(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.<key>`, for example `llama.block_count`."""
        return self.metadata.get(f"{self.metadata['general.architecture']}.{key}", default)


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def string(self) -> str:
        (length,) = _LENGTH.unpack_from(self.data, self.at)
        self.at += _LENGTH.size
        end = self.at + length
        if end > len(self.data):
            raise struct.error(f"a string of {length} bytes at {self.at}")
        text = self.data[self.at : end].decode("utf-8", "replace")
        self.at = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise struct.error(f"value type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if count > len(self.data):
            raise struct.error(f"an array of {count} entries in a file of {len(self.data)} bytes")
        if kind == _ARRAY:
            # llama.cpp reads none either; a chain of them would be as deep as the file is long.
            raise struct.error("an array of arrays")
        if kind in _SCALARS:
            layout = f"<{count}{_SCALARS[kind][1]}"
            values = list(struct.unpack_from(layout, self.data, self.at))
            self.at += struct.calcsize(layout)
            return values
        read: Callable[[], Any] = self.string if kind == _STRING else lambda: self.value(kind)
        return [read() for _ in range(count)]


def _tensor_info(cursor: _Cursor) -> TensorInfo:
    name, dimensions = cursor.string(), cursor.scalar("<I")
    if dimensions > _MAX_DIMENSIONS:
        raise struct.error(f"tensor {name} with {dimensions} dimensions")
    innermost_first = [cursor.scalar("<Q") for _ in range(dimensions)]
    return TensorInfo(
        name, tuple(reversed(innermost_first)), cursor.scalar("<I"), cursor.scalar("<Q")
    )


def _aligned(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) // alignment * alignment


def _checked_alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
        # An array could be as long as the file.
        told = alignment if isinstance(alignment, int | float) else type(alignment).__name__
        raise GGUFError(f"{path}: general.alignment is {told}; from 1 to {_MAX_ALIGNMENT}")
    return alignment


def read_gguf(path: Path) -> GGUFFile:
    """Map the file and read its header. Raises GGUFError naming the place, OSError."""
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise GGUFError(f"{path}: too short for a GGUF header")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if data[:4] != _MAGIC:
        raise GGUFError(f"{path}: does not begin with {_MAGIC!r}")
    cursor = _Cursor(data)
    cursor.at = 4
    try:
        version, num_tensors, num_values = (
            cursor.scalar("<I"), cursor.scalar("<Q"), cursor.scalar("<Q"),
        )  # fmt: skip
        if version not in (2, 3):
            raise GGUFError(f"{path}: GGUF version {version}; 2 and 3 can be read")
        metadata = {}
        for _ in range(num_values):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("<I"))
        infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    except (struct.error, MemoryError) as error:
        raise GGUFError(f"{path}: damaged header near byte {cursor.at}: {error}") from error
    if not isinstance(metadata.get("general.architecture"), str):
        raise GGUFError(f"{path}: no general.architecture, or one that is no text")
    base = _aligned(cursor.at, _checked_alignment(path, metadata))
    tensors = {
        info.name: TensorInfo(info.name, info.shape, info.ggml_type, base + info.offset)
        for info in infos
    }
    if len(tensors) < len(infos):
        twice = Counter(info.name for info in infos).most_common(1)[0][0]
        raise GGUFError(f"{path}: tensor {twice} is listed twice")
    return GGUFFile(path, metadata, tensors, memoryview(data))
