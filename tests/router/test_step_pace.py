"""A stall is work held and a step much older than steps usually are."""

from router.step_pace import STALL_MIN_S, StepPace


def stalled_at(pace: StepPace, now: float) -> bool:
    return pace.step_age_s(now, holds_work=True) > pace.stall_after_s


def test_an_idle_worker_is_never_stalled():
    pace = StepPace()
    pace.report(0.0, 5, 0.0, is_busy=False)
    assert pace.step_age_s(1000.0, holds_work=False) == 0


def test_work_is_stalled_five_seconds_after_it_was_given_to_an_idle_worker():
    pace = StepPace()
    pace.report(0.0, 5, 0.0, is_busy=False)
    pace.begin(100.0)
    assert not stalled_at(pace, 100.0 + STALL_MIN_S)
    assert stalled_at(pace, 100.1 + STALL_MIN_S)


def test_every_step_that_ends_starts_the_age_anew():
    pace = StepPace()
    pace.begin(0.0)
    for now in (4.0, 8.0, 12.0):
        pace.report(now, int(now) * 100, 0.0, is_busy=True)
    pace.report(16.0, 1200, 4.0, is_busy=True)
    assert pace.step_age_s(16.0, holds_work=True) == 4.0
    assert not stalled_at(pace, 17.0)
    assert stalled_at(pace, 17.1)


def test_slow_steps_are_given_twenty_times_their_median():
    """Steps of 1 s: 20 s; that several steps came in one report does not matter."""
    pace = StepPace()
    pace.begin(0.0)
    pace.report(0.0, 0, 0.0, is_busy=True)
    for now, steps in ((1.0, 1), (2.0, 2), (12.0, 3), (14.0, 5)):
        pace.report(now, steps, 0.0, is_busy=True)
    assert pace.stall_after_s == 20.0
    assert not stalled_at(pace, 34.0)
    assert stalled_at(pace, 34.1)


def test_a_step_of_somebody_elses_counts_by_what_the_worker_says():
    """It runs already for 6 s when this router's first request would be sent there."""
    pace = StepPace()
    pace.report(0.0, 5, 6.0, is_busy=True)
    assert pace.step_age_s(1.0, holds_work=False) == 7.0


def test_idle_time_is_not_taken_for_a_long_step():
    pace = StepPace()
    pace.report(0.0, 5, 0.0, is_busy=False)
    pace.report(100.0, 6, 0.0, is_busy=True)
    assert pace.stall_after_s == STALL_MIN_S


def test_a_step_after_which_the_worker_was_idle_tells_no_pace():
    """The report comes half a second after the step: it is not that slow."""
    pace = StepPace()
    pace.report(0.0, 5, 0.01, is_busy=True)
    pace.report(0.5, 6, 0.0, is_busy=False)
    assert pace.usual_s is None


def test_a_worker_that_counts_anew_has_moved():
    pace = StepPace()
    pace.begin(0.0)
    pace.report(1.0, 500, 0.0, is_busy=True)
    pace.report(2.0, 3, 0.0, is_busy=True)
    assert pace.step_age_s(3.0, holds_work=True) == 1.0
