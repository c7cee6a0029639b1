"""What tokens cost, by model, from a file of the operator's.

    currency = "EUR"

    [[models]]
    name = "chat"
    input = "0.15"          # for a million prompt tokens
    cached_input = "0.075"  # for those found in the prefix cache; absent: as `input`
    output = "0.60"         # for a million output tokens

Amounts are decimal strings or integers, since a binary fraction is no sum of money.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

MAX_BYTES = 1 << 20
MILLION = Decimal(1_000_000)
# So that products with counts below 10^15 have at most the 28 digits that are computed exactly.
_AMOUNT = re.compile(r"\d{1,6}(\.\d{1,6})?", re.ASCII)
_CURRENCY = re.compile(r"[A-Z]{3}", re.ASCII)
_FIELDS = frozenset(("name", "input", "cached_input", "output"))


class PricesError(ValueError):
    """A price file that cannot be used: the field and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Price:
    """Of a million tokens, in `currency` (ISO 4217)."""

    currency: str
    input: Decimal
    cached_input: Decimal
    output: Decimal

    def cost(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> Decimal:
        """Exact: what these tokens cost; `cached_tokens` are part of the prompt's."""
        fresh = prompt_tokens - cached_tokens
        millionths = (
            fresh * self.input + cached_tokens * self.cached_input + output_tokens * self.output
        )
        return millionths / MILLION


Prices = Mapping[str, Price]


def read_prices(path: Path | None) -> Prices:
    """The prices by model; none without a file. Raises PricesError, OSError."""
    if path is None:
        return {}
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise PricesError(f"more than {MAX_BYTES} bytes")
    return parse_prices(content)


def parse_prices(content: bytes) -> Prices:
    """The prices by model. Raises PricesError."""
    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError):
        raise PricesError("not TOML in UTF-8") from None
    currency = document.get("currency")
    if not isinstance(currency, str) or not _CURRENCY.fullmatch(currency):
        raise PricesError("currency: three capital letters are needed, as EUR")
    models = document.get("models", [])
    if not isinstance(models, list) or unknown(document, ("currency", "models")):
        raise PricesError("only currency and [[models]] are known")
    prices: dict[str, Price] = {}
    for index, entry in enumerate(models):
        name, price = _entry(f"models[{index}]", entry, currency)
        if name in prices:
            raise PricesError(f"models[{index}].name: another has the same")
        prices[name] = price
    return prices


def unknown(table: Mapping[str, object], known: tuple[str, ...] | frozenset[str]) -> list[str]:
    """Names in a table that mean nothing."""
    return [name for name in table if name not in known]


def _entry(where: str, entry: object, currency: str) -> tuple[str, Price]:
    if not isinstance(entry, dict):
        raise PricesError(f"{where}: a table is needed")
    if unknown(entry, _FIELDS):
        raise PricesError(f"{where}: only {', '.join(sorted(_FIELDS))} are known")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise PricesError(f"{where}.name: a model's name is needed")
    given, output = _amount(where, entry, "input"), _amount(where, entry, "output")
    cached = _amount(where, entry, "cached_input") if "cached_input" in entry else given
    return name, Price(currency, given, cached, output)


def _amount(where: str, entry: Mapping[str, object], field: str) -> Decimal:
    value = entry.get(field)
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not _AMOUNT.fullmatch(text):
        raise PricesError(f'{where}.{field}: a decimal as "0.15" is needed')
    return Decimal(text)
