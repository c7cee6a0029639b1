"""All that was computed is told or lost, to the microsecond and the token, whatever happens."""

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from noria.v1 import common_pb2, worker_pb2
from tests.support.engines import BlockMemory, make_scheduler
from worker.accounting import NOTHING, Work
from worker.engine import Engine
from worker.session_hub import SessionHub
from worker.step_message import StepMessage
from worker.translate import ModelLimits, Origin

GREEDY = common_pb2.SamplingParams(temperature=0.0, ignore_eos=True)
LIMITS = ModelLimits(1000, 128, frozenset({0}))


class UnevenRunner:
    """Each step takes another time; some fail. Counts what it computes by itself."""

    def __init__(self, pool, pauses, failing):
        self.memory = BlockMemory(pool)
        self.now, self.pauses, self.failing = 50.0, pauses, failing
        self.steps = 0

    def clock(self):
        return self.now

    def launch(self, output):
        self.steps += 1
        self.now += self.pauses[self.steps % len(self.pauses)]
        result = self.memory.launch(output)
        if self.steps in self.failing:
            raise RuntimeError("the script says so")
        return result


class InlineEngine:
    """The engine behind sessions, stepped by the test; few blocks, so that it preempts."""

    def __init__(self, pauses, failing):
        scheduler = make_scheduler(num_blocks=12, max_num_seqs=4, max_num_batched_tokens=8)
        self.runner = UnevenRunner(scheduler.pool, pauses, failing)
        self.engine = Engine(scheduler, self.runner, look_ahead=4, clock=self.runner.clock)
        self.load = self.engine.load()
        self.waiting = []

    def step_age_s(self):
        return 0.0

    def submit(self, sequence):
        self.engine.submit(sequence, arrived=self.runner.now)

    def abort(self, sequence_id):
        self.engine.abort(sequence_id)

    def step(self):
        """The output waits, as it does between the engine's thread and the loop."""
        output = self.engine.step()
        self.load = output.load
        if not output.is_empty:
            self.waiting.append(output)

    def deliver(self, hub):
        waiting, self.waiting = self.waiting, []
        for output in waiting:
            hub.deliver(output)


class Router:
    """One session at a time; adds up what its terminal entries say."""

    def __init__(self, hub):
        self.hub, self.number, self.heard = hub, 0, NOTHING
        self.entered = contextlib.ExitStack()
        self.connect()

    def connect(self):
        self.entered.close()
        self.session, self.number = self.entered.enter_context(self.hub.session()), 0

    def submit(self, prompt, choices):
        self.number += 1
        self.session.submit(
            worker_pb2.Submit(
                id=f"r{self.number}/1",
                submit_number=self.number,
                sampling=GREEDY,
                prompt_token_ids=range(5, 5 + prompt),
                max_tokens=9,
                n=choices,
            )
        )

    async def read(self):
        """Take what is there, as the writer of the session does."""
        self.session.outbox.put(StepMessage())
        for message in await self.session.outbox.take():
            self.session.sent(message)
            for terminal in message.terminals:
                self.heard += told_by(terminal)


def told_by(terminal):
    if terminal.HasField("finished"):
        work = terminal.finished
        if not work.computed_tokens:
            return NOTHING
        generated = sum(work.output_tokens)
    else:
        work = terminal.refused.work
        generated = work.output_tokens
    return Work(
        work.prompt_tokens, work.cached_tokens, generated, work.computed_tokens, work.device_us
    )


acts = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 3)),
    st.tuples(st.just("abort"), st.integers(1, 12)),
    st.tuples(st.just("abort choice"), st.integers(1, 12), st.integers(0, 2)),
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.just(("deliver",)),
    st.just(("read",)),
    st.just(("reconnect",)),
)


async def live(hub, engine, script):
    router = Router(hub)
    for act, *numbers in script:
        match act:
            case "submit":
                router.submit(*numbers)
            case "abort":
                router.session.abort(*numbers)
            case "abort choice":
                router.session.abort_choice(*numbers)
            case "steps":
                for _ in range(*numbers):
                    engine.step()
            case "deliver":
                engine.deliver(hub)
            case "read":
                await router.read()
            case "reconnect":
                router.connect()
    while engine.engine.has_work:
        engine.step()
    # What ended without a step has yet to be told.
    engine.step()
    engine.deliver(hub)
    await router.read()
    return router


@settings(max_examples=60, deadline=None)
@given(
    st.lists(acts, max_size=60),
    st.lists(st.floats(0.0, 0.02), min_size=1, max_size=7),
    st.sets(st.integers(1, 40), max_size=3),
)
async def test_told_and_lost_together_are_the_busy_time(script, pauses, failing):
    """Served, aborted, failed, preempted, several choices, sessions that end at any moment."""
    engine = InlineEngine(pauses, failing)
    hub = SessionHub(engine, LIMITS, origin=Origin(8))
    router = await live(hub, engine, script)
    accounts = hub.accounts
    assert router.heard == accounts.told
    both = accounts.told + accounts.lost
    assert both.device_us == engine.load.busy_us
    assert both.computed_tokens == engine.runner.memory.num_positions_fed


async def test_a_failed_batch_tells_what_it_had_cost():
    engine = InlineEngine([1 / 16], {3})
    hub = SessionHub(engine, LIMITS, origin=Origin(8))
    router = await live(hub, engine, [("submit", 4, 1)])
    assert router.heard == Work(4, 0, 2, 6, 3 * 62_500)


async def test_what_was_told_and_not_sent_is_lost_with_the_session():
    engine = InlineEngine([1 / 16], set())
    hub = SessionHub(engine, LIMITS, origin=Origin(8))
    script = [("submit", 4, 1), ("steps", 9), ("deliver",), ("reconnect",)]
    router = await live(hub, engine, script)
    assert router.heard == hub.accounts.told == NOTHING
    assert hub.accounts.lost == Work(4, 0, 9, 12, 9 * 62_500)


async def test_what_was_sent_is_not_lost_as_well():
    engine = InlineEngine([1 / 16], set())
    hub = SessionHub(engine, LIMITS, origin=Origin(8))
    script = [("submit", 4, 1), ("steps", 9), ("deliver",), ("read",), ("reconnect",)]
    router = await live(hub, engine, script)
    assert router.heard == hub.accounts.told == Work(4, 0, 9, 12, 9 * 62_500)
    assert hub.accounts.lost == NOTHING


async def test_a_choice_that_ended_before_its_session_did_is_lost_with_the_others():
    engine = InlineEngine([1 / 16], set())
    hub = SessionHub(engine, LIMITS, origin=Origin(8))
    aborted = [("abort choice", 1, 1), ("steps", 1), ("deliver",)]
    script = [("submit", 4, 2), ("steps", 3), *aborted, ("reconnect",)]
    await live(hub, engine, script)
    assert hub.accounts.lost.device_us == engine.load.busy_us > 0
