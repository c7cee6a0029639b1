"""Lengths drawn at random, written the way the command line has them."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

FORMS = "N, uniform:LOW:HIGH, exponential:MEAN[:LOW:HIGH] or mix:N@SHARE,N@SHARE,..."
MAX_LENGTH = 1_000_000


class DistributionError(ValueError):
    """A text that describes no distribution."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers from 1 on; `text` is how it was written."""

    text: str
    draw: Callable[[random.Random], int]


def parse_lengths(text: str) -> Lengths:
    """Raises DistributionError naming what is wrong.

    `exponential` is long-tailed: rounded, and drawn again until it lies within its bounds.
    """
    kind, _, rest = text.partition(":")
    if not rest:
        length = _length(kind, text)
        return Lengths(text, lambda rng: length)
    makers = {"uniform": _uniform, "exponential": _exponential, "mix": _mix}
    if kind not in makers:
        raise DistributionError(f"{text!r}: {FORMS}")
    return Lengths(text, makers[kind](rest, text))


def _uniform(rest: str, text: str) -> Callable[[random.Random], int]:
    low, high = _bounds(rest.split(":"), text)
    return lambda rng: rng.randint(low, high)


def _exponential(rest: str, text: str) -> Callable[[random.Random], int]:
    mean_text, *bounds = rest.split(":")
    mean = _length(mean_text, text)
    low, high = _bounds(bounds, text) if bounds else (1, min(20 * mean, MAX_LENGTH))
    # Redrawing must end soon: a tenth of all draws lies within the bounds at the least.
    if math.exp(-(low - 0.5) / mean) - math.exp(-(high + 0.5) / mean) < 0.1:
        raise DistributionError(f"{text!r}: the bounds {low}:{high} are too far from {mean}")

    def draw(rng: random.Random) -> int:
        while True:
            drawn = round(rng.expovariate(1 / mean))
            if low <= drawn <= high:
                return drawn

    return draw


def _mix(rest: str, text: str) -> Callable[[random.Random], int]:
    pairs = [entry.partition("@") for entry in rest.split(",")]
    lengths = [_length(length, text) for length, _, _ in pairs]
    shares = [_share(share, text) for _, _, share in pairs]
    if not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise DistributionError(f"{text!r}: the shares add up to {sum(shares):g}, not 1")
    return lambda rng: rng.choices(lengths, shares)[0]


def _bounds(parts: list[str], text: str) -> tuple[int, int]:
    if len(parts) != 2:
        raise DistributionError(f"{text!r}: {FORMS}")
    low, high = (_length(part, text) for part in parts)
    if low > high:
        raise DistributionError(f"{text!r}: {low} is above {high}")
    return low, high


def _length(part: str, text: str) -> int:
    if not part.isascii() or not part.isdigit() or not 1 <= int(part[:9]) <= MAX_LENGTH:
        raise DistributionError(f"{text!r}: a whole number from 1 to {MAX_LENGTH} is needed")
    return int(part)


def _share(part: str, text: str) -> float:
    try:
        share = float(part)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise DistributionError(f"{text!r}: a share above 0 and up to 1 is needed")
    return share
