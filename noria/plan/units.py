"""Sizes as people write and read them."""

import re

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """`80GiB`, `24 GB` or plain bytes -> bytes. Raises ValueError naming the text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text[:40]!r} is no size; write for example 80GiB, 24GB or 1000000")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def both_units(num_bytes: int) -> str:
    """`52.4 GB = 48.8 GiB`, in units in which the number is at least 1."""
    for decimal, binary, power in (("GB", "GiB", 3), ("MB", "MiB", 2), ("kB", "KiB", 1)):
        if abs(num_bytes) >= 1000**power:
            in_decimal, in_binary = num_bytes / 1000**power, num_bytes / 1024**power
            return f"{_short(in_decimal)} {decimal} = {_short(in_binary)} {binary}"
    return f"{num_bytes} bytes"


def exact_bytes(num_bytes: int) -> str:
    """`52,428,800,000 bytes = 52.4 GB = 48.8 GiB`."""
    exact = f"{num_bytes:,} bytes"
    return exact if abs(num_bytes) < 1000 else f"{exact} = {both_units(num_bytes)}"


def seconds(value: float) -> str:
    """`1.25 s`, `38 ms`, `0.4 ms`."""
    if value >= 1:
        return f"{value:,.2f} s"
    return f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.1f} ms"


def _short(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.2f}"
