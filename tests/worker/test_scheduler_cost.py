"""What a step costs does not grow with the line: counted in executed instructions, not in time."""

import sys
from functools import partial

import pytest

from tests.support.engines import BlockMemory, make_scheduler, make_sequence
from worker.sequence import FinishReason

RUNNING = 8


def num_instructions(act):
    """Bytecode instructions that `act` executes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def line_of(waiting, **settings):
    """RUNNING sequences that run, and a line behind them, every fifth with a sibling aside."""
    scheduler = make_scheduler(max_num_batched_tokens=2000, max_num_seqs=RUNNING, **settings)
    memory = BlockMemory(scheduler.pool)
    for number in range(1, RUNNING + 1):
        scheduler.add(make_sequence(number, 8, max_tokens=2 if number < 3 else 40, deadline=9e9))
    for number in range(100, 100 + waiting):
        sibling = make_sequence(number + 100_000, 8, choice=1, deadline=8e9)
        siblings = [sibling] if number % 5 == 0 else []
        scheduler.add(make_sequence(number, 8, deadline=8e9 - number), siblings)
    scheduler.update(output := scheduler.schedule(), memory.execute(output))
    assert scheduler.num_running == RUNNING
    return scheduler, memory


def step(scheduler, memory):
    """A step in which two sequences end, and one in which the next two enter."""
    for _ in range(2):
        assert scheduler.expire(1.0) == []
        output = scheduler.schedule()
        scheduler.update(output, memory.execute(output))
        assert (scheduler.num_waiting_tokens, scheduler.num_waiting) != (0, 0)


def refuse(scheduler, memory):
    assert not scheduler.fits_now(make_sequence(7_000_000, 8))


def abort(scheduler, memory):
    assert scheduler.finish(110, FinishReason.ABORTED)


def preempt(scheduler, memory):
    scheduler._preempt(scheduler._running.least_urgent)


@pytest.mark.parametrize("act", [step, refuse, abort, preempt])
@pytest.mark.parametrize("settings", [{"num_blocks": 64}, {"num_blocks": 24}], ids=["places", "KV"])
def test_a_hundred_times_the_line_costs_the_same(act, settings):
    """But for a search in a sorted list: 7 more comparisons for each that comes or goes."""
    short, long = (
        num_instructions(partial(act, *line_of(waiting, **settings))) for waiting in (30, 3000)
    )
    assert short > 20
    assert long <= short + 200
