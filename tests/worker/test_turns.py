"""Tenants take turns, and what is given up leaves nothing behind."""

from hypothesis import given
from hypothesis import strategies as st

from worker.grammar.turns import Turns

SALTS = [b"one", b"two", b"three"]
JOBS = st.lists(st.tuples(st.sampled_from(SALTS), st.integers(0, 99)), unique=True)


@given(JOBS, st.sets(st.integers(0, 99)))
def test_no_line_is_a_job_ahead_of_another_that_has_one(jobs, given_up):
    turns = Turns()
    for salt, job in jobs:
        turns.put(salt, (salt, job))
    for salt, job in jobs:
        if job in given_up:
            turns.remove(salt, (salt, job))
            turns.remove(salt, (salt, job))
    kept = [pair for pair in jobs if pair[1] not in given_up]
    taken = [turns.take() for _ in kept]
    assert turns.take() is None
    for salt in SALTS:
        assert [pair for pair in taken if pair[0] == salt] == [p for p in kept if p[0] == salt]
    for last in range(len(taken)):
        counts = [sum(salt == p[0] for p in taken[:last]) for salt in SALTS]
        left = [sum(salt == p[0] for p in taken[last:]) for salt in SALTS]
        behind = [count for count, more in zip(counts, left, strict=True) if more]
        assert not behind or max(counts) <= min(behind) + 1


def test_what_is_left_is_told_and_gone():
    turns = Turns()
    for job in range(3):
        turns.put(SALTS[job % 2], job)
    assert sorted(turns.clear()) == [0, 1, 2]
    assert turns.take() is None
