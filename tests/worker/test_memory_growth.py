"""SCH-08: whatever came and went, nothing of it is remembered once the worker is idle."""

from collections import Counter, OrderedDict, deque
from random import Random

import pytest

from noria.v1 import common_pb2, worker_pb2
from tests.support.engines import BlockMemory, make_scheduler
from worker.engine import Engine
from worker.session_hub import SessionHub
from worker.translate import ModelLimits, Origin

CONTAINERS = (dict, list, set, deque, OrderedDict)
GREEDY = common_pb2.SamplingParams(temperature=0.0, ignore_eos=True)


class Worker:
    """Hub, engine and scheduler in line; `now` is everybody's clock."""

    def __init__(self):
        self.now = 0.0
        self.scheduler = make_scheduler(num_blocks=40, max_num_seqs=6)
        runner = BlockMemory(self.scheduler.pool)
        self.engine = Engine(self.scheduler, runner, look_ahead=4, clock=lambda: self.now)
        limits = ModelLimits(1000, 128, frozenset({0}))
        self.hub = SessionHub(self, limits, origin=Origin(1), clock=lambda: self.now)
        self.runner = runner

    @property
    def load(self):
        return self.engine.load()

    def step_age_s(self):
        return 0.0

    def submit(self, sequence):
        self.engine.submit(sequence, self.now)

    def abort(self, sequence_id):
        self.engine.abort(sequence_id)

    def step(self):
        self.now += 0.01
        output = self.engine.step()
        self.runner.outputs.clear()
        if not output.is_empty:
            self.hub.deliver(output)

    def sizes(self, session):
        """Lengths of every container that the worker's own objects hold."""
        scheduler = self.scheduler
        owners = [
            self.hub, session, self.engine, scheduler, scheduler._waiting, scheduler._running,
            scheduler._waiting._waiting, scheduler._deadlines, scheduler._tables,
        ]  # fmt: skip
        values = {(type(o).__name__, name): v for o in owners for name, v in vars(o).items()}
        return {key: len(v) for key, v in values.items() if isinstance(v, CONTAINERS)}


def request(number, random):
    """Mostly good ones; some that are refused, by what they say or by what they need."""
    kind = random.random()
    fields = {"prompt_token_ids": [random.randint(1, 9) for _ in range(random.randint(1, 12))]}
    if kind < 0.1:
        fields["prompt_token_ids"] = []
    elif kind < 0.15:
        fields["max_tokens"] = 500
    elif kind < 0.25:
        fields["n"] = 2
    if random.random() < 0.3:
        fields["deadline_ms"] = random.choice([20, 600_000])
    defaults = {"id": f"r{number}/1", "max_tokens": random.randint(1, 8), "sampling": GREEDY}
    return worker_pb2.Submit(**{**defaults, "submit_number": number, **fields})


async def live_through(num_requests):
    worker, random, ended = Worker(), Random(5), Counter()
    with worker.hub.session() as session:
        before = worker.sizes(session)
        for number in range(1, num_requests + 1):
            session.submit(request(number, random))
            if random.random() < 0.3:
                session.abort(random.randint(max(1, number - 8), number))
            if random.random() < 0.1:
                session.abort_choice(number, random.randint(0, 2))
            worker.step()
            for message in await session.outbox.take():
                for terminal in message.terminals:
                    ended[terminal.submit_number] += 1
        while worker.engine.has_work:
            worker.step()
        for message in await session.outbox.take():
            ended.update(terminal.submit_number for terminal in message.terminals)
        session.load()
        after = worker.sizes(session)
    assert ended == dict.fromkeys(range(1, num_requests + 1), 1)
    heap = ("Deadlines", "_heap")
    assert after.pop(heap) <= 200
    assert before.pop(heap) == 0
    assert after == before
    assert worker.load.running == worker.load.waiting == worker.scheduler.pool.num_used == 0


async def test_two_thousand_requests_leave_nothing_behind():
    await live_through(2_000)


@pytest.mark.soak
async def test_twenty_thousand_requests_leave_nothing_behind():
    await live_through(20_000)
