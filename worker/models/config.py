"""What a model is, whichever kind of file described it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class ConfigError(ValueError):
    """The model asks for something that is not honoured, or contradicts itself."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a decoder-only transformer; counts unless a unit is given.

    `architecture` chooses the family. `eos_token_ids` are all ids that end a turn.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        if not self.rope_theta > 0 or not self.rms_norm_eps > 0:
            raise ConfigError(
                f"rope_theta {self.rope_theta} and rms_norm_eps {self.rms_norm_eps} must be above 0"
            )
        outside = [i for i in self.eos_token_ids if not 0 <= i < self.vocab_size]
        if outside:
            raise ConfigError(f"EOS id {outside[0]} lies outside vocab_size {self.vocab_size}")

    def check_num_layers(self, num_tensors: int) -> None:
        """Raises ConfigError for more layers than the checkpoint has tensors.

        It costs nothing, unlike a list of the tensors that so many layers would have.
        """
        if self.num_layers > num_tensors:
            raise ConfigError(
                f"num_layers is {self.num_layers}, but the checkpoint has {num_tensors} tensors"
            )


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


class Fields:
    """Typed reads of a config's raw values; errors name the file, the field and the value."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self._where = where
        self._values = values

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        if not math.isfinite(value):
            raise self._wrong(name, value, "a finite number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def ids(self, name: str) -> frozenset[int]:
        """An id, a list of ids, or nothing."""
        value = self._values.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise self._wrong(name, value, "an id or a list of ids")
        return frozenset(values)

    def _value(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self._where}: {name} is missing")
        return value

    def _wrong(self, name: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(f"{self._where}: {name} is {value!r}; {wanted} is needed")


def refuse_unless_neutral(
    where: str, values: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise ConfigError for the first value that changes the model's arithmetic.

    `neutral` lists, for each field that is not implemented, the values that switch it off.
    Absent and null always do. A field in neither `neutral` nor the caller's own list of
    known ones must not get here.
    """
    for name, value in values.items():
        if value is None or value in neutral.get(name, ()):
            continue
        allowed = ", ".join(repr(v) for v in neutral.get(name, ())) or "nothing"
        raise ConfigError(
            f"{where}: {name} = {value!r} is not supported (supported: {allowed} or absent)"
        )
