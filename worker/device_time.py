"""A step's time, divided among its sequences: whole microseconds, none lost, none twice."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def shares_us(total_us: int, positions: Sequence[int]) -> list[int]:
    """`total_us` in proportion to `positions`, all above 0: the sum is `total_us` exactly.

    Each share is the difference of two rounded running sums, so that it is off by less than
    one microsecond, and no place in the batch is always rounded up.
    """
    all_positions = sum(positions)
    ends = (total_us * passed // all_positions for passed in accumulate(positions, initial=0))
    return [end - begin for begin, end in pairwise(ends)]


def elapsed_us(began_s: float, ended_s: float) -> int:
    """Whole microseconds between two readings of a clock; stretches side by side add up."""
    return max(0, int(ended_s * 1e6) - int(began_s * 1e6))
