"""When requests leave: a number of them at a time, or at times that nothing delays."""

import math
import random
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` clients, each of which asks again as soon as it is answered."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Request i leaves `times_s[i]` after the beginning, whatever became of those before it."""

    times_s: tuple[float, ...]


Arrivals = ClosedLoop | OpenLoop


def poisson(rate: float, count: int, seed: int) -> OpenLoop:
    """`rate` requests a second on average, independent of each other."""
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return OpenLoop(tuple(times))


def replayed(path: Path, count: int, speed: float = 1.0) -> OpenLoop:
    """The first `count` times of a file with one time in seconds a line, `speed` times as fast.

    Raises ValueError naming the line that is no time or earlier than the one before it.
    """
    times: list[float] = []
    for number, line in enumerate(path.read_text().splitlines()[:count], start=1):
        try:
            time_s = float(line)
        except ValueError:
            time_s = math.nan
        if not (math.isfinite(time_s) and time_s >= (times[-1] if times else 0)):
            raise ValueError(f"{path}, line {number}: a time in seconds, not before the last one")
        times.append(time_s)
    if len(times) < count:
        raise ValueError(f"{path}: {len(times)} times for {count} requests")
    return OpenLoop(tuple(time_s / speed for time_s in times))
