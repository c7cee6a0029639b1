"""An account is settled once: when its request has ended and no attempt is left."""

from hypothesis import given
from hypothesis import strategies as st

from router.ledger.account import RequestAccount
from router.worker_news import NO_WORK, Work


def test_it_is_settled_by_whichever_comes_last_the_end_or_an_attempt():
    for ends_first in (True, False):
        account, settled = RequestAccount(), []
        account.when_settled(lambda settled=settled: settled.append(1))
        account.attempt_begun()
        steps = [account.end, lambda a=account: a.attempt_ended(Work(5, 1, 3, 700))]
        first, second = steps if ends_first else reversed(steps)
        first()
        assert not settled
        second()
        account.end()
        assert settled == [1]
        assert (account.prompt_tokens, account.cached_tokens) == (5, 1)
        assert (account.generated_tokens, account.device_us) == (3, 700)


def test_a_request_that_no_worker_had_costs_nothing():
    account, settled = RequestAccount(), []
    account.when_settled(lambda: settled.append(account.prompt_tokens))
    account.end()
    assert settled == [0]


def test_the_prompt_counts_once_and_work_of_every_attempt_counts():
    account = RequestAccount()
    for work in (Work(5, 0, 2, 100), NO_WORK, Work(5, 4, 3, 50)):
        account.attempt_begun()
        account.attempt_ended(work)
    assert (account.prompt_tokens, account.cached_tokens) == (5, 4)
    assert (account.generated_tokens, account.device_us) == (5, 150)


def test_of_a_lost_attempt_counts_what_was_received():
    account = RequestAccount()
    account.attempt_begun()
    account.attempt_lost(5, 1, 0)
    assert account.prompt_tokens == 0
    account.attempt_begun()
    account.attempt_lost(5, 1, 4)
    assert (account.prompt_tokens, account.cached_tokens) == (5, 1)
    assert account.generated_tokens == account.unconfirmed_tokens == 4
    assert account.lost_attempts == 2


@given(st.lists(st.booleans(), max_size=6), st.integers(0, 6))
def test_however_attempts_and_the_end_interleave_it_is_settled_once(outcomes, ends_at):
    account, settled = RequestAccount(), []
    account.when_settled(lambda: settled.append(1))
    for _ in outcomes:
        account.attempt_begun()
    for number, is_lost in enumerate(outcomes):
        if number == ends_at:
            account.end()
        assert not settled
        if is_lost:
            account.attempt_lost(5, 0, 1)
        else:
            account.attempt_ended(Work(5, 0, 1, 10))
    account.end()
    assert settled == [1]
    assert account.generated_tokens == len(outcomes)
