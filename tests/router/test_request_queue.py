"""The queue against a naive model: bounds, order, and everything given back."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from noria.reasons import Reason, RequestError
from router.queue import RequestQueue


class QueueMachine(RuleBasedStateMachine):
    """Admit, wait, take, put back and leave in any order."""

    MAX_REQUESTS, MAX_TOKENS = 5, 20

    def __init__(self):
        super().__init__()
        self.queue = RequestQueue(self.MAX_REQUESTS, self.MAX_TOKENS, lambda: 0.0)
        self.admitted, self.waiting, self.taken = [], [], []

    def order(self, model):
        line = [p for p in self.waiting if p.model == model]
        return sorted(line, key=lambda p: (-p.priority, p.arrival))

    @rule()
    def admit(self):
        if len(self.admitted) + len(self.waiting) >= self.MAX_REQUESTS:
            with pytest.raises(RequestError) as caught:
                self.queue.permit()
            assert caught.value.reason is Reason.QUEUE_FULL
        else:
            self.admitted.append(self.queue.permit())

    @precondition(lambda self: self.admitted)
    @rule(
        data=st.data(),
        model=st.sampled_from("ab"),
        priority=st.integers(-1, 1),
        tokens=st.integers(1, 30),
    )
    def wait(self, data, model, priority, tokens):
        permit = data.draw(st.sampled_from(self.admitted))
        held = sum(p.tokens for p in self.waiting)
        arguments = {"model": model, "priority": priority, "tokens": tokens}
        if held and held + tokens > self.MAX_TOKENS:
            with pytest.raises(RequestError):
                self.queue.wait(permit, permit.arrival, **arguments)
        else:
            self.queue.wait(permit, permit.arrival, **arguments)
            self.admitted.remove(permit)
            self.waiting.append(permit)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def take_head(self, data):
        model = data.draw(st.sampled_from(self.queue.models()))
        permit = self.queue.head(model)
        assert permit is self.order(model)[0]
        self.queue.take(permit)
        self.waiting.remove(permit)
        self.taken.append(permit)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def put_back(self, data):
        permit = data.draw(st.sampled_from(self.taken))
        self.queue.put_back(permit)
        self.taken.remove(permit)
        self.waiting.append(permit)

    @precondition(lambda self: self.admitted or self.waiting or self.taken)
    @rule(data=st.data(), twice=st.booleans())
    def leave(self, data, twice):
        permit = data.draw(st.sampled_from(self.admitted + self.waiting + self.taken))
        for _ in range(1 + twice):
            permit.leave()
        for place in (self.admitted, self.waiting, self.taken):
            if permit in place:
                place.remove(permit)

    @invariant()
    def counts_agree(self):
        assert self.queue.num_requests == len(self.admitted) + len(self.waiting)
        assert self.queue.num_tokens == sum(p.tokens for p in self.waiting)
        assert sorted(self.queue.models()) == sorted({p.model for p in self.waiting})
        for model in "ab":
            assert self.queue.waiting_for(model) == self.order(model)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_permit_leaves_with_its_block():
    queue = RequestQueue(1, 10, lambda: 0.0)

    def fail_while_waiting() -> None:
        with queue.permit() as permit:
            queue.wait(permit, "x", model="m", priority=0, tokens=3)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_while_waiting()
    assert (queue.num_requests, queue.num_tokens, queue.models()) == (0, 0, [])


def test_a_prompt_of_any_length_may_wait_in_an_empty_queue():
    queue = RequestQueue(2, 10, lambda: 0.0)
    with queue.permit() as permit:
        queue.wait(permit, "x", model="m", priority=0, tokens=1000)
        assert queue.head("m") is permit


def test_the_retry_hint_follows_the_recent_pace():
    """Four places freed in 20 s: the next in about 5 s; unknown and odd paces are bounded."""
    now = 0.0
    queue = RequestQueue(1, 10, lambda: now)
    assert queue.retry_after_s() == 5.0
    for now in (0.0, 5.0, 10.0, 15.0):  # noqa: B007 - the queue's clock reads it
        with queue.permit() as permit:
            queue.wait(permit, "x", model="m", priority=0, tokens=1)
            queue.take(permit)
    now = 20.0
    assert queue.retry_after_s() == 5.0
    with queue.permit(), pytest.raises(RequestError) as caught:
        queue.permit()
    assert caught.value.retry_after_s == 5.0
    now = 1000.0
    assert queue.retry_after_s() == 5.0
