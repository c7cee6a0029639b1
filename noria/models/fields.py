"""Reading a config's raw values: each is honoured, harmless, or refused by name."""

import math
from collections.abc import Mapping
from typing import Any

from noria.models.config import ConfigError


class Fields:
    """Typed reads of a config's raw values; errors name the file, the field and the value."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._wrong(name, value, "a finite number")
        return number

    def boolean(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.integer(name)

    def optional_number(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def ids(self, name: str) -> frozenset[int]:
        """An id, a list of ids, or nothing."""
        value = self.values.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise self._wrong(name, value, "an id or a list of ids")
        return frozenset(values)

    def words(self, name: str, count: int, allowed: tuple[str, ...]) -> list[str]:
        """A list of `count` of the `allowed` words."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != count:
            raise self._wrong(name, value, f"a list of {count} words")
        strange = [word for word in value if word not in allowed]
        if strange:
            raise ConfigError(
                f"{self.where}: {name} = {strange[0]!r} is not supported"
                f" (supported: {', '.join(allowed)})"
            )
        return value

    def object(self, name: str) -> Mapping[str, Any]:
        """An object, empty where there is none."""
        value = self.values.get(name)
        if not isinstance(value, dict | None):
            raise self._wrong(name, value, "an object")
        return value or {}

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.where}: {name} is missing")
        return value

    def _wrong(self, name: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {value!r:.80}; {wanted} is needed")


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
