"""Phases are disjoint, never negative, and add up to the total, whatever is reported."""

from hypothesis import given
from hypothesis import strategies as st

from router.timeline import Phase, Timeline

PHASES = st.sampled_from(list(Phase))
REPORTED = st.lists(st.tuples(PHASES, st.integers(-(10**12), 10**12)), max_size=4)
MOVES = st.one_of(
    st.tuples(st.just("enter"), PHASES, REPORTED),
    st.tuples(st.just("divide"), PHASES, st.integers(0, 10**9), REPORTED),
    st.tuples(st.just("close")),
)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@given(st.lists(st.tuples(st.floats(0, 1e4), MOVES), max_size=30))
def test_any_moves_with_any_reports_add_up_to_the_clocks_own_measure(moves):
    clock = Clock()
    timeline = Timeline(clock)
    for seconds, (name, *arguments) in moves:
        clock.now += seconds
        getattr(timeline, name)(*arguments)
        total_us, phases = timeline.read()
        assert sum(us for _, us in phases) == total_us == timeline.elapsed_us()
        assert all(us > 0 for _, us in phases)
        if name != "divide":
            assert total_us == int(clock.now * 1e6) - int(100.0 * 1e6)


def test_reported_durations_are_placed_inside_and_the_rest_is_transport():
    clock = Clock()
    timeline = Timeline(clock)
    timeline.enter(Phase.ENCODE)
    clock.now += 10
    timeline.enter(Phase.QUEUE, [(Phase.ENCODE, 7_000_000)])
    assert timeline.read()[1] == [(Phase.ENCODE, 7_000_000), (Phase.TRANSPORT, 3_000_000)]


def test_a_report_longer_than_the_stretch_fills_it_in_order():
    clock = Clock()
    timeline = Timeline(clock)
    timeline.enter(Phase.BATCH_WAIT)
    clock.now += 10
    timeline.enter(Phase.DECODE, [(Phase.BATCH_WAIT, 4_000_000), (Phase.PREFILL, 99_000_000)])
    assert timeline.read()[1] == [(Phase.BATCH_WAIT, 4_000_000), (Phase.PREFILL, 6_000_000)]


def test_a_stretch_can_be_divided_afterwards_and_earlier_ones_stay():
    clock = Clock()
    timeline = Timeline(clock)
    timeline.enter(Phase.DECODE)
    clock.now += 1
    timeline.enter(Phase.DECODE)
    clock.now += 2
    stretch_us = timeline.enter(Phase.DELIVERY)
    timeline.divide(Phase.DECODE, stretch_us, [(Phase.DECODE, 500_000)])
    assert timeline.read()[1] == [(Phase.DECODE, 1_500_000), (Phase.TRANSPORT, 1_500_000)]


def test_after_the_end_no_time_passes_unless_it_goes_on_after_all():
    clock = Clock()
    timeline = Timeline(clock)
    timeline.enter(Phase.DELIVERY)
    clock.now += 1
    timeline.close()
    clock.now += 5
    assert timeline.read()[0] == timeline.elapsed_us() == 1_000_000
    timeline.close()
    assert timeline.read() == (6_000_000, [(Phase.DELIVERY, 6_000_000)])


def test_a_clock_that_steps_back_takes_nothing_away():
    clock = Clock()
    timeline = Timeline(clock)
    clock.now += 2
    timeline.enter(Phase.QUEUE)
    clock.now -= 1
    timeline.close()
    assert timeline.read() == (2_000_000, [(Phase.ADMISSION, 2_000_000)])
