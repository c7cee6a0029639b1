"""Many requests with random endings through all services: each is told of exactly once."""

import asyncio
import random
import time
from collections import Counter

import grpc
import structlog

from noria.v1 import chat_pb2, chat_pb2_grpc, common_pb2
from router.calls import Calls
from router.wire_record import MAX_TIMELINE_BYTES, TIMELINE_KEY
from tests.support.stack import API_KEY, running_stack
from tests.support.waiting import until

COUNT = 500
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


class Client:
    """Asks with a random fate; remembers the timelines that came back."""

    def __init__(self, stub, rng):
        self.stub, self.rng = stub, rng
        self.timelines: dict[str, common_pb2.Timeline] = {}
        self.walls_us: dict[str, float] = {}

    async def ask(self, index):
        way = self.rng.choices(list(WAYS), list(WAYS.values()))[0]
        began = time.monotonic()
        call = self.call(index, way)
        try:
            request_id = await self.read(call, way)
            trailing = await call.trailing_metadata()
            outcome = "SERVED"
        except grpc.aio.AioRpcError as error:
            trailing, outcome = error.trailing_metadata() or (), error.code().name
            request_id = dict(trailing).get("noria-request-id", "")
        except asyncio.CancelledError:
            return "CLOSED"
        self.keep(request_id, dict(trailing).get(TIMELINE_KEY), began)
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
        return request_id

    def keep(self, request_id, raw, began):
        if raw is not None:
            assert len(raw) <= MAX_TIMELINE_BYTES
            timeline = common_pb2.Timeline.FromString(raw)
            if timeline.reason == common_pb2.REASON_UNSPECIFIED:
                assert self.timelines[request_id] == timeline
            self.timelines[request_id] = timeline
            self.walls_us[request_id] = (time.monotonic() - began) * 1e6

    async def record(self, request_id):
        request = chat_pb2.GetRequestRequest(request_id=request_id)
        return await self.stub.GetRequest(request, metadata=KEY)


async def test_each_request_has_one_outcome_and_one_timeline_that_adds_up(
    golden_model, script_file, monkeypatch
):
    received = []
    new_record = Calls._new_record

    def counting(calls, *arguments):
        received.append(new_record(calls, *arguments))
        return received[-1]

    monkeypatch.setattr(Calls, "_new_record", counting)
    script = script_file(mean_output_tokens=20, step_seconds=0.001, token_ids=[32, 127])
    pool = {"num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    with structlog.testing.capture_logs() as lines:
        async with (
            running_stack(
                golden_model, num_workers=2, script=script,
                router={"max_queued_requests": 100}, **pool,
            ) as stack,
            grpc.aio.insecure_channel(stack.router.address) as channel,
        ):  # fmt: skip
            client = Client(chat_pb2_grpc.ChatServiceStub(channel), random.Random(3))
            asking = []
            for index in range(COUNT):
                asking.append(asyncio.create_task(client.ask(index)))
                await asyncio.sleep(client.rng.random() * 0.004)
            seen = Counter(await asyncio.gather(*asking))
            await until(lambda: set(stack.held().values()) == {0})
            told = {record.request_id: record for record in received}
            outcomes = [line for line in lines if line["event"] == "request"]
            assert sorted(line["request_id"] for line in outcomes) == sorted(told)
            for line in outcomes:
                await check(client, line)
            counted = stack.router.metrics_registry
            total = sum(
                sample.value
                for family in counted.collect() if family.name == "noria_requests"
                for sample in family.samples if sample.name == "noria_requests_total"
            )  # fmt: skip
    assert total == len(told) <= COUNT
    ended = Counter(line["outcome"] for line in outcomes)
    assert ended["SERVED"] >= seen["SERVED"] > COUNT / 5
    assert {"CANCELLED", "INVALID_FIELD", "CONTEXT_LENGTH_EXCEEDED", "INVALID_KEY"} <= set(ended)
    assert not [line for line in lines if line["event"] == "defect"]


async def check(client, line):
    """The log line, the record and what the client got tell the same story."""
    phases_ms = {k: v for k, v in line.items() if k.endswith("_ms")}
    total_ms = phases_ms.pop("total_ms")
    phases_ms.pop("first_delta_ms", None)
    assert abs(sum(phases_ms.values()) - total_ms) < 1e-6
    if not line["tenant"]:
        # Refused, or gone, before its key was looked at: a line is all there is.
        assert line["outcome"] in ("INVALID_KEY", "CANCELLED")
        return
    request_id = line["request_id"]
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
