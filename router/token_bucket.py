"""A token bucket in whole numbers: a minute's worth at most, refilled evenly.

A level counts in units of 1/60,000 token, so that a limit of N per minute refills exactly N
units per millisecond and nothing is ever rounded but the clock, down to milliseconds. With a
limit of 10**10 all values stay below 2**53: an IEEE double holds them exactly, and a Lua
script computes the same. A level below zero is a debt, a minute's worth at most.
"""

UNITS = 60_000
# From the deepest debt to full.
FULL_AFTER_MS = 2 * 60_000


def full(per_minute: int) -> int:
    """The level of a full bucket."""
    return per_minute * UNITS


def refilled(level: int, per_minute: int, elapsed_ms: int) -> int:
    """The level after some time; a clock that went backwards brings nothing."""
    elapsed_ms = min(max(elapsed_ms, 0), FULL_AFTER_MS)
    return min(level + elapsed_ms * per_minute, full(per_minute))


def charged(level: int, per_minute: int, amount: int) -> int:
    """The level after taking `amount`; a negative one gives back, up to a full bucket."""
    top = full(per_minute)
    return max(-top, min(level - amount * UNITS, top))


def left(level: int) -> int:
    """How much may be taken now, in whole ones."""
    return max(level, 0) // UNITS


def wait_ms(level: int, per_minute: int, amount: int) -> int:
    """Milliseconds until `amount` may be taken if nobody else takes any; 0: now."""
    missing = amount * UNITS - level
    return max(0, -(-missing // per_minute))
