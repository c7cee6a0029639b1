"""Many requests with random endings through all services: each is told of exactly once.

The workers are processes; one is killed and started again under load.
"""

import asyncio
import contextvars
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import grpc
import pytest
import structlog

from noria.v1 import chat_pb2, chat_pb2_grpc, common_pb2
from router.calls import Calls
from router.record import RequestRecord
from router.wire_record import MAX_TIMELINE_BYTES, TIMELINE_KEY
from tests.support.processes import address, exit_code, worker_fleet
from tests.support.scraping import scrape
from tests.support.stack import API_KEY
from tests.support.waiting import until

KEY = (("authorization", f"Bearer {API_KEY}"),)
WAYS = {
    "serve": 8,
    "close": 3,
    "cancel": 3,
    "deadline": 2,
    "invalid": 1,
    "too long": 1,
    "no key": 1,
}
ENDINGS = {
    "SERVED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INVALID_FIELD",
    "CONTEXT_LENGTH_EXCEEDED",
    "INVALID_KEY",
    "QUEUE_FULL",
    "WORKER_LOST",
}
WORKER_FLAGS = (
    "--num-blocks", "128", "--block-size", "16",
    "--max-num-seqs", "8", "--max-num-batched-tokens", "128",
)  # fmt: skip
# More than the queue holds, at once, while one worker is away.
BURST, MAX_QUEUED = 120, 60


class Client:
    """Asks with a random fate; remembers ids and timelines that came back."""

    def __init__(self, stub, rng):
        self.stub, self.rng = stub, rng
        self.asking = []
        self.request_ids = set()
        self.timelines: dict[str, common_pb2.Timeline] = {}
        self.walls_us: dict[str, float] = {}

    async def ask_many(self, count, pause_s=0.0):
        """Begin so many, whether or not earlier ones have ended."""
        for _ in range(count):
            self.asking.append(asyncio.create_task(self.ask(len(self.asking))))
            if pause_s:
                await asyncio.sleep(self.rng.random() * pause_s)

    async def ask(self, index):
        way = self.rng.choices(list(WAYS), list(WAYS.values()))[0]
        began = time.monotonic()
        call = self.call(index, way)
        try:
            await self.read(call, way)
            trailing = await call.trailing_metadata()
            outcome = "SERVED"
        except grpc.aio.AioRpcError as error:
            trailing, outcome = error.trailing_metadata() or (), error.code().name
        except asyncio.CancelledError:
            return "CLOSED"
        self.keep(dict(trailing).get(TIMELINE_KEY), began)
        return outcome

    def call(self, index, way):
        text = "네?" if way == "serve" else "토마토는 " * (index % 40 + 1)
        block = chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text=text))
        spec = chat_pb2.ChatSpec(
            messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER, content=[block])],
            max_tokens=10**6 if way == "too long" else 1 + index % 12,
            sampling=common_pb2.SamplingParams(temperature=9 if way == "invalid" else 1),
            stop_sequences=["e"] if index % 3 == 0 else [],
        )
        return self.stub.StreamChat(
            chat_pb2.StreamChatRequest(spec=spec),
            metadata=() if way == "no key" else KEY,
            timeout=self.rng.random() * 0.1 if way == "deadline" else 60,
        )

    async def read(self, call, way):
        request_id = dict(await call.initial_metadata()).get("noria-request-id", "")
        self.request_ids.add(request_id)
        patience = self.rng.randrange(8)
        while (response := await call.read()) is not grpc.aio.EOF:
            patience -= 1
            if way == "close" and patience < 0:
                call.cancel()
            if way == "cancel" and patience == 0:
                request = chat_pb2.CancelRequestRequest(request_id=request_id)
                await self.stub.CancelRequest(request, metadata=KEY)
            if response.event.HasField("message_delta"):
                self.timelines[request_id] = response.event.message_delta.timeline

    def keep(self, raw, began):
        if raw is not None:
            assert len(raw) <= MAX_TIMELINE_BYTES
            timeline = common_pb2.Timeline.FromString(raw)
            if timeline.reason == common_pb2.REASON_UNSPECIFIED:
                # A deadline may pass before the client has read all that was served to it.
                assert self.timelines.get(timeline.request_id, timeline) == timeline
            self.timelines[timeline.request_id] = timeline
            self.walls_us[timeline.request_id] = (time.monotonic() - began) * 1e6

    async def record(self, request_id):
        request = chat_pb2.GetRequestRequest(request_id=request_id)
        return await self.stub.GetRequest(request, metadata=KEY)


@dataclass
class Walls:
    """How long each request took by another reading of the router's clock: from its handler's
    entry to the end of its record. Each end is read on both sides of the router's own reading,
    so that a process which is off the processor in between changes nothing.
    """

    entered: dict[str, tuple[float, float]] = field(default_factory=dict)
    closed: dict[str, tuple[float, float]] = field(default_factory=dict)

    def bounds_ms(self, request_id):
        """The least and the most that it may be told to have taken."""
        began, ended = self.entered[request_id], self.closed[request_id]
        return (ended[0] - began[1]) * 1e3, (ended[1] - began[0]) * 1e3


@pytest.fixture
def walls(monkeypatch):
    noted, now = Walls(), contextvars.ContextVar("now")
    serve, new_record, close = Calls.serve, Calls._new_record, RequestRecord.close

    async def timed_serve(calls, *arguments):
        now.set(time.monotonic())
        await serve(calls, *arguments)

    def noting_record(calls, *arguments):
        record = new_record(calls, *arguments)
        assert record.request_id not in noted.entered
        noted.entered[record.request_id] = now.get(), time.monotonic()
        return record

    def noting_close(record, *reason):
        began, before = time.monotonic(), (record.is_over, record.reason)
        close(record, *reason)
        if (record.is_over, record.reason) != before:
            noted.closed[record.request_id] = began, time.monotonic()

    monkeypatch.setattr(Calls, "serve", timed_serve)
    monkeypatch.setattr(Calls, "_new_record", noting_record)
    monkeypatch.setattr(RequestRecord, "close", noting_close)
    return noted


@pytest.mark.parametrize(
    ("count", "kills"), [(400, 1), pytest.param(2000, 4, marks=pytest.mark.soak)]
)
async def test_each_request_has_one_outcome_and_one_timeline_that_adds_up(
    golden_model, script_file, walls, count, kills
):
    """Served, closed, cancelled, late, invalid, refused, its worker killed: nothing stays held."""
    script = script_file(mean_output_tokens=20, step_seconds=0.003, token_ids=[32, 127])
    limits = {"max_queued_requests": MAX_QUEUED}
    with structlog.testing.capture_logs() as lines:
        async with (
            worker_fleet(
                golden_model, script, worker_flags=WORKER_FLAGS, router=limits
            ) as (running, router, tokenizer),
            grpc.aio.insecure_channel(router.address) as channel,
        ):  # fmt: skip
            client = Client(chat_pb2_grpc.ChatServiceStub(channel), random.Random(3))
            for number in range(kills):
                await ask_through_a_kill(client, running, router, count // kills, number)
            seen = Counter(await asyncio.gather(*client.asking))
            await check_nothing_held(running, router, tokenizer)
            outcomes = [line for line in lines if line["event"] == "request"]
            for line in outcomes:
                await check(client, walls, line)
            counted = counted_requests(router)
    check_counts(client, walls, outcomes, counted, seen, count)
    assert not [line for line in lines if line["event"] == "defect"]
    news = Counter(line["event"] for line in lines)
    assert news["worker_connected"] == 2 + kills


async def ask_through_a_kill(client, running, router, count, number):
    """Half of the requests, a kill and a burst, a quarter, the worker's return, the rest."""
    name = f"worker {number % 2}"
    killed = running.children[name]
    place = await address(killed)
    await client.ask_many(count // 2 - BURST // 2, 0.004)
    await until(lambda: any(w.worker_id == place and w.attempts for w in router.registry))
    await exit_code(killed, signal.SIGKILL)
    await client.ask_many(BURST)
    again = asyncio.create_task(running.start_worker(name, *WORKER_FLAGS, listen=place))
    await client.ask_many(count // 4 - BURST // 2, 0.004)
    await again
    await until(lambda: any(w.worker_id == place for w in router.registry), timeout=30)
    await client.ask_many(count - count // 2 - count // 4, 0.004)


def counted_requests(router):
    """The metric's own count by outcome."""
    counted = Counter()
    for family in router.metrics_registry.collect():
        if family.name == "noria_requests":
            for sample in family.samples:
                if sample.name == "noria_requests_total" and sample.value:
                    counted[sample.labels["outcome"]] += sample.value
    return counted


async def check_nothing_held(running, router, tokenizer):
    """Router, tokenizer and both workers' processes."""
    await until(lambda: set(router.held().values()) == {0}, timeout=30)
    addresses = [*await running.metrics_addresses(), router.metrics_address]
    addresses.append(tokenizer.metrics_address)
    for place in addresses:
        figures = await scrape(place)
        held = {
            name: value for name, value in figures.of_type("gauge").items()
            if name[0] in HELD_GAUGES and value
        }  # fmt: skip
        assert held == {}, place


HELD_GAUGES = {
    "noria_held",
    "noria_queue_requests",
    "noria_queue_tokens",
    "noria_sequences_demand",
    "noria_kv_tokens_demand",
    "noria_tokenizer_open_slots",
    "noria_worker_running_sequences",
    "noria_worker_waiting_sequences",
    "noria_worker_waiting_tokens",
    "noria_worker_kv_tokens_used",
    "noria_worker_live_submits",
}


def check_counts(client, walls, outcomes, counted, seen, count):
    """What came in, what the log tells, what the metrics count and what clients know."""
    told = Counter(line["request_id"] for line in outcomes)
    assert set(told.values()) == {1}
    assert set(told) == set(walls.entered) == set(walls.closed) >= client.request_ids - {""}
    # A call that its client ended before it arrived is known to nobody else.
    unknown = seen["CLOSED"] + seen["DEADLINE_EXCEEDED"]
    assert count - unknown <= len(told) <= count
    ended = Counter(line["outcome"] for line in outcomes)
    assert counted == ended
    # Whether anybody is late, meets a full queue or loses its worker is a matter of pace.
    assert {"SERVED", "CANCELLED", "INVALID_FIELD"} <= set(ended) <= ENDINGS
    assert ended["SERVED"] >= seen["SERVED"] > count / 8


async def check(client, walls, line):
    """The log line, the record and what the client got tell the same story."""
    phases_ms = {k: v for k, v in line.items() if k.endswith("_ms")}
    total_ms = phases_ms.pop("total_ms")
    phases_ms.pop("first_delta_ms", None)
    assert abs(sum(phases_ms.values()) - total_ms) < 1e-6
    request_id = line["request_id"]
    least_ms, most_ms = walls.bounds_ms(request_id)
    assert least_ms - 2 <= total_ms <= most_ms + 2
    if not line["tenant"]:
        # Refused, or gone, before its key was looked at: a line is all there is.
        assert line["outcome"] in ("INVALID_KEY", "CANCELLED", "DEADLINE_EXCEEDED")
        return
    record = await client.record(request_id)
    timeline = record.timeline
    assert sum(phase.duration_us for phase in timeline.phases) == timeline.total_us
    assert timeline.total_us / 1000 == total_ms
    assert (timeline.reason == 0) == (line["outcome"] == "SERVED")
    sent = client.timelines.get(request_id)
    if sent is not None and request_id in client.walls_us:
        assert (sent.phases, sent.usage, sent.reason) == (
            timeline.phases, timeline.usage, timeline.reason,
        )  # fmt: skip
        assert timeline.total_us <= client.walls_us[request_id] + 2000
