"""Retries are at most a tenth of the requests, and a first one is always there."""

from hypothesis import given
from hypothesis import strategies as st

from router.retry_budget import RetryBudget


@given(st.lists(st.booleans(), max_size=500))
def test_retries_never_exceed_a_tenth_of_the_requests_and_one(is_request):
    budget, requests, retries = RetryBudget(), 0, 0
    for request in is_request:
        if request:
            budget.deposit()
            requests += 1
        else:
            retries += budget.withdraw()
        assert retries <= 1 + requests / 10 + 1e-6


def test_a_budget_that_is_spent_grows_with_ten_requests_and_not_with_nine():
    budget = RetryBudget()
    assert budget.withdraw()
    assert not budget.withdraw()
    for _ in range(9):
        budget.deposit()
    assert not budget.withdraw()
    budget.deposit()
    assert budget.withdraw()


def test_a_long_peace_saves_ten_retries_and_no_more():
    budget = RetryBudget()
    for _ in range(1000):
        budget.deposit()
    assert [budget.withdraw() for _ in range(11)] == [True] * 10 + [False]
