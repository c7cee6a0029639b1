"""Room and choice of worker, from figures alone."""

from dataclasses import replace

import pytest

from router.policy import Need, has_room, pick_worker, slowness
from router.requests import Generation, Sampling
from router.token_stream import TokenStream
from router.worker_news import Finish, Refusal, WorkerReport
from router.worker_state import (
    LOAD_TTL_S,
    LoadReport,
    PriorityLoad,
    WorkerFigures,
    WorkerState,
)

FIGURES = WorkerFigures("i", "m", (), "v", 1000, 32, 16, 100, 0)
NEED = Need(16, 26)
EMPTY = LoadReport(0.0, 0, 0, 0, 0, 100, False)


class Quiet:
    """A line to a worker, a sink and a queue that do nothing."""

    def __getattr__(self, name):
        return lambda *arguments, **named: None


def worker(load: LoadReport | None = EMPTY, name: str = "w", **figures) -> WorkerState:
    state = WorkerState(name, replace(FIGURES, **figures), Quiet())
    if load is not None:
        state.report(load)
    return state


def stream(prompt: int = 16, max_tokens: int = 10, priority: int = 0) -> TokenStream:
    generation = Generation("r", "m", [0] * prompt, Sampling(), 0, max_tokens, priority, 1e9, False)
    return TokenStream(generation, Quiet(), Quiet(), Quiet())


def takes(state: WorkerState, prompt: int, now: float = 0.0, **need) -> bool:
    return has_room(state, Need(prompt, prompt, **need), now)


def fill(state: WorkerState, prompt: int = 16, priority: int = 0) -> int:
    """Submit until there is no room; how many went."""
    count = 0
    while takes(state, prompt, priority=priority):
        state.submit(stream(prompt, priority=priority), 0.0)
        count += 1
    return count


def test_an_unreported_or_outdated_load_means_no_room():
    assert not takes(worker(None), 1, 0.0)
    assert takes(worker(), 1, LOAD_TTL_S)
    assert not takes(worker(), 1, LOAD_TTL_S + 0.001)


@pytest.mark.parametrize(("max_num_seqs", "expected"), [(1, 1), (4, 4), (32, 32), (64, 64)])
def test_what_was_sent_since_the_report_takes_places(max_num_seqs, expected):
    """All places, and as many as may wait where the report shows all of them running."""
    state = worker(max_num_seqs=max_num_seqs)
    assert fill(state) == expected
    state.report(replace(EMPTY, running=expected, last_submit_number=expected))
    assert fill(state) == max(1, max_num_seqs // 16)


def test_a_report_includes_only_what_it_names():
    state = worker(replace(EMPTY, running=30))
    for _ in range(3):
        state.submit(stream(), 0.0)
    state.report(replace(EMPTY, running=31, last_submit_number=2))
    assert [a.prompt_tokens for a in state.submitted_since_load()] == [16]


def test_blocks_bound_prompts_and_the_look_ahead_goes_beyond():
    """10 free blocks hold 5 prompts of 32 tokens; the look-ahead of 2 is there from the start."""
    state = worker(replace(EMPTY, free_blocks=10))
    assert fill(state, prompt=32) == 5
    assert fill(worker(replace(EMPTY, free_blocks=0)), prompt=32) == 2
    assert fill(worker(replace(EMPTY, free_blocks=0, waiting=2)), prompt=32) == 0


def test_blocks_that_waiting_tokens_will_need_are_not_free():
    load = replace(EMPTY, waiting=2, waiting_tokens=16 * 95)
    assert takes(worker(load), 16 * 5, 0.0)
    assert not takes(worker(load), 16 * 5 + 1, 0.0)


def test_a_draining_worker_and_one_that_just_refused_have_no_room():
    assert not takes(worker(replace(EMPTY, draining=True)), 1, 0.0)
    state = worker()
    state.submit(stream(), 0.0)
    state.refuse(1, Refusal.FULL, "", "")
    assert not takes(state, 1, 0.0)
    state.report(EMPTY)
    assert takes(state, 1, 0.0)


BATCH = -100


def holding(*levels: PriorityLoad, free_blocks: int = 0, **figures) -> WorkerState:
    """A worker of 32 places and 100 blocks that yields places, and holds these."""
    load = replace(
        EMPTY,
        running=sum(level.running for level in levels),
        waiting=sum(level.waiting for level in levels),
        waiting_tokens=sum(level.waiting_tokens for level in levels),
        free_blocks=free_blocks,
        priorities=levels,
    )
    return worker(load, **{"yields_places": True, **figures})


FULL_OF_BATCH = PriorityLoad(BATCH, 32, 2, 32, yielded_blocks=100)


def test_what_lower_priorities_hold_is_in_no_higher_ones_way():
    """All places and blocks are taken by batch work, and more of it waits there."""
    state = holding(FULL_OF_BATCH)
    assert fill(state, priority=BATCH) == 0
    assert fill(state, priority=0) == 32
    assert fill(state, priority=5) == 32
    assert fill(holding(FULL_OF_BATCH), prompt=320, priority=0) == 5


def test_what_equals_and_higher_ones_hold_is_in_the_way():
    half = PriorityLoad(BATCH, 12, yielded_blocks=30), PriorityLoad(0, 20, 1, 16, 100)
    assert fill(holding(*half), priority=0) == 32 - 20 - 1
    assert fill(holding(*half), priority=1) == 32
    assert fill(holding(*half), prompt=96, priority=0) == (30 - 1) // 6
    assert fill(holding(*half, free_blocks=7), priority=BATCH) == 1


def test_a_worker_that_does_not_yield_places_has_those_that_it_has():
    """One of an earlier version, whatever it reports; also before its report shows what it got."""
    state = holding(FULL_OF_BATCH, yields_places=False)
    assert fill(state, priority=0) == 0
    fresh = worker(yields_places=False)
    assert fill(fresh, priority=BATCH) == 32
    assert not takes(fresh, 16, priority=0)
    assert fill(worker(yields_places=True), priority=BATCH) == 32


def test_a_refusal_closes_a_worker_for_those_who_would_be_refused_like_it():
    state = holding(FULL_OF_BATCH)
    state.submit(stream(priority=0), 0.0)
    state.refuse(1, Refusal.FULL, "", "")
    assert not takes(state, 16, priority=0)
    assert not takes(state, 16, priority=-1)
    assert takes(state, 16, priority=1)
    state.report(EMPTY)
    state.submit(stream(), 0.0)
    state.refuse(2, Refusal.FULL, "", "sampling.structured_output")
    assert takes(state, 16)
    assert not takes(state, 16, has_grammar=True)
    state.submit(stream(), 0.0)
    state.refuse(3, Refusal.DRAINING, "", "")
    assert not takes(state, 16, priority=100)


def test_a_worker_that_waits_for_nothing_but_grammars_owes_no_step():
    state = worker()
    state.submit(stream(), 0.0)
    for now in range(1, 60):
        state.report(replace(EMPTY, received_at=now, last_submit_number=1, preparing=1))
        assert not state.is_stalled(now)
    state.report(replace(EMPTY, received_at=60, last_submit_number=1, running=1))
    assert state.is_stalled(70)


def test_the_fewest_tokens_in_flight_win_among_those_with_room():
    first, second, full = worker(name="a"), worker(name="b"), worker(None, name="c")
    first.submit(stream(max_tokens=500), 0.0)
    second.submit(stream(max_tokens=100), 0.0)
    assert pick_worker([first, second, full], NEED, 0.0).worker is second
    first.finish(1, [Finish.EOS], WorkerReport(1))
    assert first.tokens_in_flight == 0
    assert pick_worker([first, second, full], NEED, 0.0).worker is first
    assert pick_worker([full], NEED, 0.0) is None


def test_a_closed_session_holds_nothing():
    state = worker()
    for _ in range(3):
        state.submit(stream(), 0.0)
    state.close()
    assert (state.attempts, state.tokens_in_flight) == ({}, 0)


def paced(step_s: float, name: str = "w") -> WorkerState:
    """A worker that has done two steps of this length, and holds nothing."""
    state = worker(name=name)
    for count in (1, 2, 3):
        state.report(replace(EMPTY, received_at=count * step_s, step_count=count, running=1))
    state.report(replace(EMPTY, received_at=0.0, step_count=3))
    return state


def picks(*workers: WorkerState, count: int) -> list[str]:
    """Who gets each of so many requests of one size, none of which ends."""
    chosen = []
    for _ in range(count):
        best = pick_worker(workers, NEED, 0.0).worker
        best.submit(stream(), 0.0)
        chosen.append(best.worker_id)
    return chosen


def test_a_worker_four_times_slower_is_given_a_fifth():
    """Four times as many tokens in flight at the fast one: both would be done together."""
    chosen = picks(paced(0.25, "slow"), paced(0.0625, "fast"), count=20)
    assert chosen.count("slow") == 4
    assert chosen[:3] == ["fast"] * 3


def test_workers_of_about_one_speed_are_equal():
    chosen = picks(paced(0.07, "a"), paced(0.05, "b"), count=10)
    assert chosen.count("a") == 5


def test_a_worker_whose_speed_is_unknown_counts_as_fast():
    """It would never be known otherwise."""
    assert picks(worker(name="new"), paced(0.0625, "known"), count=1) == ["new"]
    assert slowness(None, 0.1) == slowness(0.1, None) == slowness(0.1, 0.15) == 1
