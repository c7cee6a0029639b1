"""What planning needs to know of a model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LARGEST = 1 << 40
_MAX_CONFIG_BYTES = 16 << 20


class ShapeError(ValueError):
    """The description does not say what the model is, or names one that is not known."""


@dataclass(frozen=True, slots=True)
class Count:
    """Some of the model's parameters: what they are, and how many."""

    words: str
    count: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer; counts unless a unit is given.

    parameters            all of them, in groups
    window                positions that a windowed layer sees; None: no layer has a window
    dtype                 in which the checkpoint is kept; None: not said
    """

    family: str
    parameters: tuple[Count, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    window: int | None = None
    num_windowed_layers: int = 0
    dtype: str | None = None

    @property
    def num_parameters(self) -> int:
        return sum(part.count for part in self.parameters)


class Values:
    """Typed reads of a description; errors name the file, the field and the value."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self._values = values

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def count(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise ShapeError(f"{self.where}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ShapeError(f"{self.where}: {name} is {_told(value)}; an integer is needed")
        if not 1 <= value <= _LARGEST:
            raise ShapeError(f"{self.where}: {name} is {value}; from 1 to {_LARGEST}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ShapeError(f"{self.where}: {name} is {_told(value)}; true or false is needed")
        return value


def read_json(path: Path) -> Values:
    """A config.json. Raises ShapeError, OSError."""
    size = path.stat().st_size
    if size > _MAX_CONFIG_BYTES:
        raise ShapeError(f"{path}: {size} bytes; a config has at most {_MAX_CONFIG_BYTES}")
    try:
        values = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ShapeError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ShapeError(f"{path}: not a JSON object")
    return Values(str(path), values)


def _told(value: object) -> str:
    return repr(value)[:60]
