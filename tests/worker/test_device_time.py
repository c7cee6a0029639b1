"""A step's time is divided without a remainder, in proportion to positions."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from worker.device_time import elapsed_us, shares_us

positions = st.lists(st.integers(1, 4096), min_size=1, max_size=256)


@given(st.integers(0, 10**9), positions)
def test_shares_add_up_to_the_step_and_none_is_off_by_a_microsecond(total_us, counts):
    shares = shares_us(total_us, counts)
    assert sum(shares) == total_us
    for share, count in zip(shares, counts, strict=True):
        assert abs(share - total_us * count / sum(counts)) < 1


@given(st.lists(st.floats(0, 1, allow_nan=False), min_size=2, max_size=50))
def test_stretches_side_by_side_add_up_to_the_whole(pauses):
    times = [1e5]
    for pause in pauses:
        times.append(times[-1] + pause)
    parts = [elapsed_us(a, b) for a, b in pairwise(times)]
    assert sum(parts) == elapsed_us(times[0], times[-1])
