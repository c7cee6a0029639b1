"""Weights of a Hugging Face folder: `model.safetensors`, or shards with an index."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker.models.weights import WeightsError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsWeights:
    """Memory-mapped; a tensor is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Opens every shard. Raises WeightsError naming the file that is missing or damaged."""
        self._of: dict[str, Any] = {}
        for path in _shards(folder):
            shard = _open(path)
            for name in shard.keys():  # noqa: SIM118 (the shard itself is not iterable)
                if name in self._of:
                    raise WeightsError(f"{path}: {name} is in more than one file")
                self._of[name] = shard
        self._check_index(folder)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(s.get_slice(name).get_shape()) for name, s in self._of.items()}

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._of[name].get_tensor(name)
        return tensor

    def _check_index(self, folder: Path) -> None:
        for name, file in _weight_map(folder).items():
            if name not in self._of:
                raise WeightsError(f"{folder / _INDEX}: {name} should be in {file} and is not")


def _shards(folder: Path) -> list[Path]:
    files = sorted(set(_weight_map(folder).values())) or [_SINGLE]
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: no readable weight_map: {error!r}") from error


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise WeightsError(f"{path}: damaged or truncated at {size} bytes: {error}") from error
