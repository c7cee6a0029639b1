"""Who goes where and when: order, overtaking, retries; by figures and an injected clock."""

from dataclasses import replace

import pytest

from noria.reasons import Reason
from router.dispatch import OVERTAKING_S, Dispatcher
from router.queue import RequestQueue
from router.registry import Registry
from router.requests import Generation, Sampling
from router.token_stream import TokenStream
from router.worker_news import NewTokens, Refusal
from router.worker_state import LoadReport, PriorityLoad, WorkerFigures, WorkerState
from tests.router.fakes import FakeClock

FIGURES = WorkerFigures("i", "m", (), "v", 10_000, 32, 16, 100, 0)
FULL = LoadReport(1000.0, 0, 8, 2, 0, 4, False)


class Line:
    """A line to a worker that remembers prompts' lengths and aborts."""

    def __init__(self):
        self.prompts, self.aborts = [], []

    def submit(self, generation, attempt, submit_number):
        self.prompts.append(len(generation.prompt_token_ids))

    def abort(self, submit_number):
        self.aborts.append(submit_number)


class Sink:
    """Remembers how a request failed."""

    def __init__(self):
        self.error, self.places, self.queued, self.wasted = None, [], [], 0

    def on_queued(self, position):
        self.queued.append(position)

    def on_placed(self, worker_id, routing_note):
        self.places.append(worker_id)

    def on_tokens(self, new):
        pass

    def on_report(self, report):
        pass

    def on_attempt_ended(self, work):
        pass

    def on_attempt_lost(self, received_tokens):
        pass

    def on_wasted(self, num_tokens):
        self.wasted += num_tokens

    def on_failed(self, error):
        self.error = error


class House:
    """A dispatcher with workers "a", "b" ..."""

    def __init__(self, workers=1, load=None, figures=FIGURES):
        self.clock = FakeClock()
        self.registry = Registry()
        self.registry.tell_vocabulary("t", "m", "v")
        self.queue = RequestQueue(1000, 10**6, self.clock)
        self.dispatcher = Dispatcher(self.queue, self.registry, self.clock)
        self.lines = {}
        for name in "abcd"[:workers]:
            self.lines[name] = Line()
            self.registry.add(WorkerState(name, figures, self.lines[name]))
        self.report(load or replace(FULL, running=0, waiting=0, free_blocks=100))

    def worker(self, name="a") -> WorkerState:
        return next(w for w in self.registry if w.worker_id == name)

    def report(self, load=FULL, *names):
        for worker in list(self.registry):
            if not names or worker.worker_id in names:
                last = max(worker.attempts, default=0)
                now = self.clock.now
                worker.report(replace(load, received_at=now, last_submit_number=last))
        self.dispatcher.dispatch()

    def add(self, prompt, priority=0, max_tokens=16) -> TokenStream:
        sink = Sink()
        generation = Generation(
            "r", "m", [0] * prompt, Sampling(), 0, max_tokens, priority, 1e9, False
        )
        stream = TokenStream(generation, self.queue.permit(), sink, self.dispatcher)
        stream.sink = sink
        return stream.__enter__()


YIELDING = replace(FIGURES, yields_places=True)
BATCH_ALONE = replace(
    FULL, running=32, waiting=2, free_blocks=0, priorities=(PriorityLoad(-100, 32, 2, 32, 10),)
)


def test_whom_a_head_that_fits_nowhere_lets_pass_may_count_on_what_lower_priorities_yield():
    """160 tokens of two that wait there and 10 blocks: there is room for the small one alone."""
    house = House(figures=YIELDING, load=BATCH_ALONE)
    for prompt in (16, 16, 160, 48):
        house.add(prompt)
    assert house.lines["a"].prompts == [16, 16, 48]
    house.add(16, priority=-100)
    assert house.lines["a"].prompts == [16, 16, 48]
    house.add(16, priority=5)
    assert house.lines["a"].prompts == [16, 16, 48, 16]


def test_smaller_ones_pass_a_head_that_fits_nowhere_for_a_second_and_no_longer():
    house = House(load=FULL)
    head = house.add(160)
    house.add(64)
    assert house.lines["a"].prompts == [64]
    house.clock.now += OVERTAKING_S - 0.01
    house.report()
    house.add(48)
    assert house.lines["a"].prompts == [64, 48]
    house.clock.now += 0.01
    house.report()
    house.add(16)
    assert house.lines["a"].prompts == [64, 48]
    house.report(replace(FULL, free_blocks=10))
    assert house.lines["a"].prompts == [64, 48, 160]
    assert head.sink.places == ["a"]
    house.report(replace(FULL, free_blocks=10))
    assert house.lines["a"].prompts == [64, 48, 160, 16]


def test_only_smaller_ones_pass():
    house = House(load=FULL)
    house.add(160)
    house.add(160)
    house.add(200)
    assert house.lines["a"].prompts == []


def test_room_is_kept_at_one_worker_and_the_others_go_on():
    """The one with the most spare blocks waits for the head; small ones go to the other."""
    house = House(workers=2, load=FULL)
    house.report(replace(FULL, free_blocks=6), "b")
    house.add(160)
    house.clock.now += OVERTAKING_S
    house.report(FULL, "a")
    house.report(replace(FULL, free_blocks=6), "b")
    for _ in range(3):
        house.add(32)
    assert house.lines["a"].prompts == [32, 32]
    assert house.lines["b"].prompts == []


def test_a_head_that_was_placed_and_came_back_has_a_second_again():
    house = House(load=FULL)
    head = house.add(160)
    house.clock.now += OVERTAKING_S
    house.report(replace(FULL, free_blocks=10))
    assert head.sink.places == ["a"]
    house.worker().refuse(1, Refusal.FULL, "", "")
    house.report()
    house.add(16)
    assert house.lines["a"].prompts == [160, 16]
    assert head.sink.queued == [0, 0]


def test_equal_workers_take_turns():
    house = House(workers=2)
    for _ in range(10):
        house.add(16)
    assert [len(line.prompts) for line in house.lines.values()] == [5, 5]


def test_idle_workers_take_turns_too():
    """Each request is over before the next comes: nobody gets all of them."""
    house = House(workers=2)
    for _ in range(10):
        stream = house.add(16)
        name = stream.sink.places[0]
        stream.withdraw()
        house.worker(name).refuse(max(house.worker(name).attempts), Refusal.INVALID, "", "")
    assert [len(line.prompts) for line in house.lines.values()] == [5, 5]


def test_a_worker_short_of_blocks_is_passed_over_for_a_busier_one():
    """40 more tokens in flight cost less than the 128 tokens of KV that the other lacks."""
    house = House(workers=2)
    house.report(replace(FULL, running=1, waiting=0, free_blocks=2), "a")
    first = house.add(16, max_tokens=24)
    assert first.sink.places == ["b"]
    house.report(replace(FULL, running=1, waiting=0, free_blocks=100), "b")
    second = house.add(16, max_tokens=144)
    assert second.sink.places == ["b"]
    third = house.add(16, max_tokens=16)
    assert third.sink.places == ["a"]


def test_of_equal_costs_the_lower_kv_pressure_wins():
    house = House(workers=2)
    house.report(replace(FULL, running=1, waiting=0, free_blocks=50), "a")
    house.report(replace(FULL, running=1, waiting=0, free_blocks=60), "b")
    assert house.add(16).sink.places == ["b"]


def test_an_internal_error_before_the_first_token_is_tried_at_another_worker():
    house = House(workers=2)
    stream = house.add(16)
    (failed,) = stream.sink.places
    house.worker(failed).refuse(1, Refusal.INTERNAL, "", "")
    house.dispatcher.dispatch()
    assert len(set(stream.sink.places)) == 2
    house.worker(stream.sink.places[1]).refuse(1, Refusal.INTERNAL, "", "")
    assert stream.sink.error.reason is Reason.INTERNAL


def test_an_internal_error_after_the_first_token_is_final():
    house = House(workers=2)
    stream = house.add(16)
    worker = house.worker(stream.sink.places[0])
    worker.deliver(1, NewTokens([5]))
    worker.refuse(1, Refusal.INTERNAL, "", "")
    assert stream.sink.error.reason is Reason.INTERNAL


def test_retries_end_with_their_budget():
    """Every request fails everywhere: one in ten, and the first, is tried again."""
    house, retried = House(workers=4), 0
    for _ in range(40):
        stream = house.add(16)
        while stream.sink.error is None:
            worker = house.worker(stream.sink.places[-1])
            worker.refuse(max(worker.attempts), Refusal.INTERNAL, "", "")
            house.dispatcher.dispatch()
        retried += len(stream.sink.places) - 1
    assert retried == 1 + 4


@pytest.mark.parametrize("refusal", [Refusal.INVALID, Refusal.INTERNAL])
def test_neither_a_clients_mistake_nor_a_failure_closes_a_worker(refusal):
    """RTR-01."""
    house = House()
    for _ in range(20):
        house.add(16)
        house.worker().refuse(max(house.worker().attempts), refusal, "", "")
    assert house.add(16).sink.places == ["a"]


def test_unstarted_requests_leave_a_worker_and_started_ones_stay():
    house = House(workers=2)
    streams = [house.add(16) for _ in range(4)]
    started = streams[0]
    house.worker("a").deliver(1, NewTokens([5]))
    assert house.worker("a").give_up_unstarted() == 1
    house.registry.remove(house.worker("a"))
    house.dispatcher.dispatch()
    assert house.lines["a"].aborts == [2]
    assert started.sink.places == ["a"]
    assert streams[2].sink.places == ["a", "b"]


PATIENCE_S = 10.0


def _leave(house: House) -> WorkerState:
    worker = house.worker("a")
    house.registry.remove(worker)
    house.dispatcher.give_up_unserved(PATIENCE_S)
    return worker


def test_the_queued_wait_for_a_worker_as_long_as_they_are_told_and_no_longer():
    house = House(load=FULL)
    waiting = house.add(160)
    _leave(house)
    house.clock.now += PATIENCE_S
    house.dispatcher.give_up_unserved(PATIENCE_S)
    assert waiting.sink.error is None
    house.clock.now += 0.1
    house.dispatcher.give_up_unserved(PATIENCE_S)
    assert waiting.sink.error.reason is Reason.NO_WORKER


def test_a_worker_that_was_away_long_ago_takes_nothing_from_todays_patience():
    house = House(load=FULL)
    waiting = house.add(160)
    worker = _leave(house)
    house.clock.now += PATIENCE_S - 0.1
    house.registry.add(worker)
    house.clock.now += 1000.0
    _leave(house)
    house.clock.now += PATIENCE_S
    house.dispatcher.give_up_unserved(PATIENCE_S)
    assert waiting.sink.error is None


def test_a_model_whose_workers_only_the_new_tokenizer_misunderstands_gets_the_whole_patience():
    house = House(load=FULL)
    waiting = house.add(160)
    house.clock.now += 1000.0
    house.registry.tell_vocabulary("t", "m", "another")
    house.dispatcher.give_up_unserved(PATIENCE_S)
    house.clock.now += PATIENCE_S
    house.dispatcher.give_up_unserved(PATIENCE_S)
    assert waiting.sink.error is None
    house.clock.now += 0.1
    house.dispatcher.give_up_unserved(PATIENCE_S)
    assert waiting.sink.error.reason is Reason.NO_WORKER
