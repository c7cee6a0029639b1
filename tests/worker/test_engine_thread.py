"""The engine's thread loses no submit and no abort, and stops when told to."""

import threading

import pytest

from tests.support.engines import BlockMemory, expected_output, make_scheduler, make_sequence
from worker.engine import Engine
from worker.engine_output import EngineLoad
from worker.engine_thread import EngineStoppedError, EngineThread
from worker.sequence import FinishReason


class GatedRunner:
    """Waits at a gate in every step; says when it has got there."""

    def __init__(self, pool):
        self.memory = BlockMemory(pool)
        self.gate = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)

    def launch(self, output):
        self.arrived.release()
        assert self.gate.acquire(timeout=10)
        return self.memory.execute(output)


class Harness:
    def __init__(self):
        self.scheduler = make_scheduler()
        self.runner = GatedRunner(self.scheduler.pool)
        self.entered = []
        self.outputs = []
        self.news = threading.Semaphore(0)

    def build(self):
        self.thread_name = threading.current_thread().name
        return Engine(self.scheduler, self.runner, look_ahead=4), "facts"

    def on_output(self, output):
        if output.entered:
            self.entered.append((set(output.entered), len(self.outputs)))
            return
        self.outputs.append(output)
        self.news.release()

    def next_output(self):
        assert self.news.acquire(timeout=10)
        return self.outputs[-1]


@pytest.fixture
def harness():
    return Harness()


def test_the_engine_is_built_and_run_on_its_own_thread(harness):
    with EngineThread(harness.build, harness.on_output) as thread:
        assert thread.ready.result(timeout=10) == "facts"
        assert harness.thread_name == "engine"
        sequence = make_sequence(1, max_tokens=2)
        thread.submit(sequence)
        harness.runner.gate.release(2)
        harness.next_output()
        output = harness.next_output()
    assert output.ended[0].sequence is sequence
    assert sequence.output_token_ids == expected_output(sequence.prompt_token_ids, 2)
    assert thread.load.free_blocks == 64


def test_a_build_that_fails_is_reported(harness):
    def build():
        raise ValueError("no such model")

    with (
        EngineThread(build, harness.on_output) as thread,
        pytest.raises(ValueError, match="no such"),
    ):
        thread.ready.result(timeout=10)


def test_a_sequence_that_enters_the_batch_is_told_before_the_step_and_once(harness):
    with EngineThread(harness.build, harness.on_output) as thread:
        thread.submit(make_sequence(1, max_tokens=2))
        assert harness.runner.arrived.acquire(timeout=10)
        assert harness.entered == [({1}, 0)]
        thread.submit(make_sequence(2, max_tokens=1))
        harness.runner.gate.release(2)
        harness.next_output()
        harness.next_output()
        assert harness.entered == [({1}, 0), ({2}, 1)]


def test_an_abort_while_a_step_runs_takes_effect_at_its_end(harness):
    with EngineThread(harness.build, harness.on_output) as thread:
        thread.submit(make_sequence(1, max_tokens=50))
        assert harness.runner.arrived.acquire(timeout=10)
        assert thread.step_age_s() > 0
        thread.abort(1)
        harness.runner.gate.release()
        output = harness.next_output()
        assert output.ended[0].sequence.finish_reason is FinishReason.ABORTED
        assert output.load.free_blocks == 64
        assert output.load.running == 0


def test_submit_and_abort_in_one_breath_during_a_step_leave_nothing(harness):
    with EngineThread(harness.build, harness.on_output) as thread:
        thread.submit(make_sequence(1, max_tokens=1))
        assert harness.runner.arrived.acquire(timeout=10)
        thread.submit(make_sequence(2, max_tokens=50))
        thread.abort(2)
        harness.runner.gate.release()
        output = harness.next_output()
        ended = {e.sequence.sequence_id: e.sequence.finish_reason for e in output.ended}
        assert ended == {1: FinishReason.LENGTH, 2: FinishReason.ABORTED}
        assert not harness.runner.memory.outputs[-1].scheduled[1:]


def test_an_engine_that_breaks_is_reported(harness):
    def broken():
        engine, facts = harness.build()
        engine.scheduler.schedule = lambda: 1 / 0
        return engine, facts

    with EngineThread(broken, harness.on_output) as thread:
        thread.ready.result(timeout=10)
        thread.submit(make_sequence(1))
        assert isinstance(thread.crashed.result(timeout=10), ZeroDivisionError)


def test_an_engine_that_breaks_before_its_first_step_is_never_ready(harness):
    def broken():
        engine, facts = harness.build()
        engine.load = lambda: 1 / 0
        return engine, facts

    with EngineThread(broken, harness.on_output) as thread:
        assert isinstance(thread.ready.exception(timeout=10), ZeroDivisionError)


def test_leaving_the_context_stops_an_idle_thread(harness):
    with EngineThread(harness.build, harness.on_output) as thread:
        thread.ready.result(timeout=10)
    assert thread.join(10)


def test_submits_and_aborts_take_effect_in_the_order_in_which_they_came(harness):
    def build():
        return Engine(harness.scheduler, harness.runner, look_ahead=1), "facts"

    harness.scheduler = make_scheduler(max_num_seqs=1)
    harness.runner = GatedRunner(harness.scheduler.pool)
    with EngineThread(build, harness.on_output) as thread:
        thread.submit(make_sequence(1, max_tokens=50))
        assert harness.runner.arrived.acquire(timeout=10)
        thread.submit(make_sequence(2, max_tokens=50))
        thread.abort(1)
        thread.abort(2)
        thread.submit(make_sequence(3, max_tokens=1))
        harness.runner.gate.release(10)
        while not any(e.sequence.sequence_id == 3 for o in harness.outputs for e in o.ended):
            harness.next_output()
    assert not any(output.refused for output in harness.outputs)


def test_nobody_who_waits_for_the_thread_can_cancel_what_it_reports(harness):
    with EngineThread(harness.build, harness.on_output) as thread:
        assert not thread.crashed.cancel()
        assert not thread.ready.cancel()
        assert thread.ready.result(timeout=10) == "facts"


def test_a_build_is_told_that_it_should_stop(harness):
    started, told = threading.Event(), threading.Event()

    def build():
        started.set()
        assert told.wait(10)
        thread.raise_if_stopping()

    with EngineThread(build, harness.on_output) as thread:
        assert started.wait(10)
    told.set()
    with pytest.raises(EngineStoppedError):
        thread.ready.result(timeout=10)


def test_the_pace_of_tokens_is_forgotten_once_nothing_is_computed(harness):
    now = [50.0]
    with EngineThread(harness.build, harness.on_output, clock=lambda: now[0]) as thread:
        thread.submit(make_sequence(1, max_tokens=1))
        harness.runner.gate.release()
        harness.next_output()
        thread._publish(EngineLoad(tokens_per_second=9.0))
        assert thread.load.tokens_per_second == 9.0
        now[0] += 1.5
        assert thread.load.tokens_per_second == 0.0
