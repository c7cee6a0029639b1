"""Many requests with random endings: one outcome each, and nothing held afterwards."""

import asyncio
import random
from collections import Counter

import grpc
import pytest
import structlog

from noria.v1 import chat_pb2
from tests.router.fakes import (
    EOS,
    FakeWorker,
    Setup,
    bearer,
    events,
    routed,
)

OUTCOMES = {
    "SERVED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INVALID_FIELD",
    "WORKER_LOST",
    "NO_WORKER",
}


class BusyWorker(FakeWorker):
    """Generates by itself, one token a step; refuses and breaks now and then."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(max_num_seqs=8)
        self._chance = chance

    async def generate(self) -> None:
        while True:
            for number in list(self.live):
                if self._chance.random() < 0.1:
                    self.finish(number, "eos", EOS)
                else:
                    self.emit(number, 10)
            if self._chance.random() < 0.01:
                self.break_session()
            self.say_load()
            await asyncio.sleep(self._chance.random() * 0.005)

    def _submitted(self, submit) -> None:
        super()._submitted(submit)
        if self._chance.random() < 0.05:
            self.refuse(submit.submit_number, 1)


async def run_one(setup: Setup, chance: random.Random) -> str:
    """One request with a random fate; the status that the client saw."""
    fate = chance.choice(["serve", "serve", "close", "cancel", "deadline", "invalid"])
    if fate == "invalid":
        call = setup.stream(temperature=9)
    else:
        call = setup.stream(timeout=chance.random() * 0.05 if fate == "deadline" else 30)
    reading = asyncio.create_task(events(call))
    if fate in ("close", "cancel"):
        await asyncio.sleep(chance.random() * 0.05)
    if fate == "close":
        reading.cancel()
    if fate == "cancel":
        request_id = dict(await call.initial_metadata())["noria-request-id"]
        request = chat_pb2.CancelRequestRequest(request_id=request_id)
        await setup.stub.CancelRequest(request, metadata=bearer())
    try:
        await reading
    except grpc.aio.AioRpcError as error:
        return error.code().name
    except asyncio.CancelledError:
        return "CLOSED"
    return "OK"


@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_happens_each_request_ends_once_and_nothing_is_held(seed):
    """RTR-02, CAN-04: served, closed, cancelled, late, invalid, refused, worker lost: all counters
    at zero.
    """
    chance = random.Random(seed)
    workers = [BusyWorker(chance), BusyWorker(chance)]
    count = 150
    with structlog.testing.capture_logs() as lines:
        async with routed(*workers) as setup:
            generating = [asyncio.create_task(worker.generate()) for worker in workers]
            seen = await asyncio.gather(*(run_one(setup, chance) for _ in range(count)))
            await setup.at_rest()
            for task in generating:
                task.cancel()
    outcomes = Counter(line["outcome"] for line in lines if line["event"] == "request")
    # A call that ends before its metadata is read was never accepted.
    assert (
        count - seen.count("CLOSED") - seen.count("DEADLINE_EXCEEDED") <= outcomes.total() <= count
    )
    assert set(outcomes) <= OUTCOMES
    assert outcomes["SERVED"] >= seen.count("OK") > 0
    assert not [line for line in lines if line["event"] == "defect"]
