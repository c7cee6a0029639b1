"""Where the time went adds up to what the client waited, whatever was reported."""

from hypothesis import given
from hypothesis import strategies as st

from noria.explain.observation import Asked, Observation
from noria.explain.steps import steps_of
from noria.explain.times import BETWEEN, NETWORK, QUEUE, TOKENIZING, pace_of, tenths, times_of
from tests.support.observed import answer, delta, timeline

ASKED = Asked([("user", "q")])
US = st.integers(0, 10**9)


def seen(wall_us, arrivals=(), told=None):
    return Observation(ASKED, wall_us, arrivals, told or timeline())


def test_the_network_is_what_the_client_waited_beyond_the_routers_total():
    told = timeline(admission=10, encode=20, queue=30, detokenize=5, transport=7)
    times = times_of(seen(100, told=told))
    assert times[NETWORK] == 28
    assert (times[TOKENIZING], times[QUEUE], times[BETWEEN]) == (25, 30, 7)
    assert times.wall_us == 100


@given(st.dictionaries(st.sampled_from(["admission", "queue", "prefill", "decode"]), US), US)
def test_the_stretches_add_up_to_the_wall_time_and_none_is_negative(phases, network):
    told = timeline(**phases)
    times = times_of(seen(told.total_us + network, told=told))
    assert times.wall_us == told.total_us + network
    assert min(times.stretches.values()) >= 0


def test_clocks_that_differ_do_not_make_a_stretch_negative():
    times = times_of(seen(99, told=timeline(decode=100)))
    assert (times[NETWORK], times.wall_us) == (0, 100)


@given(st.lists(US, max_size=12))
def test_shown_tenths_add_up_and_are_each_less_than_one_off(figures):
    shown = tenths(figures)
    assert sum(shown) == round(sum(figures) / 100)
    assert all(abs(tenth - us / 100) <= 1 for tenth, us in zip(shown, figures, strict=True))


def test_pace_is_taken_from_when_tokens_came():
    observation = seen(1_000_000, answer(5, first_us=100_000, every_us=20_000))
    pace = pace_of(observation, steps_of(observation))
    assert (pace.first_us, pace.num_tokens, pace.between_us) == (100_000, 5, 20_000)
    assert pace.tokens_per_second == 50


def test_the_first_token_counts_from_its_text_and_one_token_has_no_pace():
    observation = seen(9_000, [delta(1_000, text=""), delta(7_000, text="x")])
    pace = pace_of(observation, steps_of(observation))
    assert (pace.first_us, pace.tokens_per_second) == (7_000, 0)
    nothing = seen(9_000)
    assert pace_of(nothing, []).first_us is None
