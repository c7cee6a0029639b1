"""Weights of a Hugging Face folder: `model.safetensors`, or shards with an index."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker.models.weights import WeightsError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
# As the safetensors library has it, in bytes.
_MAX_HEADER = 100_000_000
# Constants of the rotary embedding, which old checkpoints hold though the config has them.
_ANGLES = re.compile(r"\.rotary_emb\.inv_freq$")


class SafetensorsWeights:
    """Memory-mapped; a tensor is read when it is asked for."""

    def __init__(self, folder: Path, passed_over: re.Pattern[str] = _ANGLES) -> None:
        """Opens every shard. `passed_over` is found in names of what is no parameter.

        Raises WeightsError naming the file that is missing or damaged, or the tensor that is
        in the wrong file, in two, or not of floats.
        """
        weight_map = _weight_map(folder)
        self._of: dict[str, Any] = {}
        for path in _shards(folder, weight_map):
            shard = _open(path)
            for name in shard.keys():  # noqa: SIM118 (the shard itself is not iterable)
                if not passed_over.search(name):
                    self._add(name, shard, path, weight_map)
        for name, file in weight_map.items():
            if name not in self._of and not passed_over.search(name):
                raise WeightsError(f"{folder / _INDEX}: {name} should be in {file} and is not")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(s.get_slice(name).get_shape()) for name, s in self._of.items()}

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._of[name].get_tensor(name)
        return tensor

    def drop_copy(self, name: str, of: str) -> None:
        """Forget `name`, if it is there. Raises WeightsError unless it equals `of`."""
        if name not in self._of or of not in self._of:
            return
        if not torch.equal(self.read(name), self.read(of)):
            raise WeightsError(f"{name} differs from {of}, though the config ties them")
        del self._of[name]

    def _add(self, name: str, shard: Any, path: Path, weight_map: dict[str, str]) -> None:
        if name in self._of:
            raise WeightsError(f"{path}: {name} is in more than one file")
        file = weight_map.get(name, path.name)
        if file != path.name:
            raise WeightsError(f"{path}: {name} is here, by the index it should be in {file}")
        dtype = shard.get_slice(name).get_dtype()
        if dtype not in _FLOATS:
            raise WeightsError(
                f"{path}: {name} is of type {dtype}, which is not supported ({', '.join(_FLOATS)})"
            )
        self._of[name] = shard


def _shards(folder: Path, weight_map: dict[str, str]) -> list[Path]:
    files = sorted(set(weight_map.values())) or [_SINGLE]
    for file in files:
        if Path(file).name != file:
            raise WeightsError(f"{folder / _INDEX}: {file!r} is not a plain file name")
        if not (folder / file).is_file():
            raise WeightsError(f"{folder}: {file} is missing")
    return [folder / file for file in files]


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name; empty where there is no index."""
    path = folder / _INDEX
    if not path.exists():
        return {}
    try:
        weight_map = json.loads(path.read_text("utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path}: no readable weight_map: {error!r}") from error


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        short = _first_beyond(path, size)
        raise WeightsError(
            f"{path}: damaged or truncated at {size} bytes: {short or error}"
        ) from error


def _first_beyond(path: Path, size: int) -> str | None:
    """What the header says of the first tensor whose bytes the file lacks, if it says it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > min(size, _MAX_HEADER):
            return None
        try:
            header = dict(json.loads(file.read(length)))
            header.pop("__metadata__", None)
            ends = {
                name: 8 + length + int(about["data_offsets"][1]) for name, about in header.items()
            }
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
            return None
    beyond = {name: end for name, end in ends.items() if end > size}
    if not beyond:
        return None
    name = min(beyond, key=beyond.__getitem__)
    return f"{name} ends at byte {beyond[name]}"
