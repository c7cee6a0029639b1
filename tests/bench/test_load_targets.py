"""Both kinds of server are read alike: tokens, times, ends, refusals, and what is wrong."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from bench.load.grpc_target import grpc_target
from bench.load.openai_target import openai_target
from bench.load.outcome import BROKEN, CANCELLED, SERVED, Outcome
from bench.load.workload import Request
from tests.router.fakes import EOS, KEY, routed

REQUEST = Request(0, "be brief", "hi", output_tokens=3)


async def asked(target, request=REQUEST):
    outcome = Outcome(0, time.perf_counter())
    await target.ask(request, outcome)
    return outcome


@asynccontextmanager
async def a_router(ids=(10, 11, 12), end="length", key=KEY):
    async with routed() as setup:
        setup.worker.auto = None
        asking = asyncio.create_task(answer_all(setup, ids, end))
        try:
            async with grpc_target(
                setup.router.address, [key], model="", temperature=0, clock=time.perf_counter
            ) as target:
                yield setup, target
        finally:
            asking.cancel()


async def answer_all(setup, ids, end):
    number = 0
    while True:
        number += 1
        await setup.submitted(number)
        for token_id in ids[:-1]:
            setup.worker.emit(number, token_id, cached=1)
        setup.worker.finish(number, end, ids[-1])


@asynccontextmanager
async def an_openai_server(lines, status=200, seen=None):
    async def chat(request):
        if seen is not None:
            seen.append((await request.json(), request.headers.get("Authorization")))
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for line in lines:
            await response.write(b"data: " + json.dumps(line).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        async with openai_target(
            f"http://127.0.0.1:{port}",
            ["secret"],
            model="m",
            temperature=0,
            clock=time.perf_counter,
        ) as target:
            yield target
    finally:
        await runner.cleanup()


def delta(text, finish=None):
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}


async def test_a_router_is_asked_for_the_exact_tokens_and_read_to_the_end():
    async with a_router() as (setup, target):
        outcome = await asked(target)
        submit = setup.worker.submits[0]
    assert (submit.max_tokens, submit.sampling.ignore_eos) == (3, True)
    assert (outcome.ended, outcome.fault, outcome.output_tokens) == (SERVED, "", 3)
    assert outcome.cached_tokens == 1
    assert 1 <= len(outcome.message_times) <= 3
    assert outcome.sent_at <= outcome.message_times[0] <= outcome.ended_at


async def test_a_stream_that_brought_too_little_is_served_and_faulty():
    async with a_router(ids=(10, EOS), end="eos") as (_, target):
        outcome = await asked(target)
    assert (outcome.ended, outcome.fault) == (SERVED, "2 tokens for 3 asked")


async def test_a_refusal_is_told_by_its_reason():
    async with a_router(key="wrong") as (_, target):
        assert (await asked(target)).ended == "INVALID_KEY"


async def test_a_stream_closed_early_is_cancelled_at_the_worker():
    async with routed() as setup:
        async with grpc_target(
            setup.router.address, [KEY], model="", temperature=0, clock=time.perf_counter
        ) as target:
            asking = asyncio.create_task(asked(target, Request(0, "", "hi", 3, cancel_after=1)))
            await setup.submitted(1)
            setup.worker.emit(1, 10)
            assert (await asking).ended == CANCELLED
            await setup.at_rest()
        assert setup.worker.aborts == [1]


async def test_an_openai_server_is_read_alike():
    seen = []
    async with an_openai_server([delta("a"), delta("bc", "length"), USAGE], seen=seen) as target:
        outcome = await asked(target)
    (body, authorization) = seen[0]
    assert authorization == "Bearer secret"
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (3, True, True)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert (outcome.ended, outcome.fault) == (SERVED, "")
    assert (outcome.input_tokens, outcome.output_tokens) == (9, 3)
    assert len(outcome.message_times) == 2


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([delta("a", "stop"), USAGE], "it did not end by max_tokens"),
        ([delta("a", "length")], "0 tokens for 3 asked"),
        ([delta("", "length"), USAGE], "no text"),
    ],
)
async def test_what_an_openai_server_did_not_deliver_is_a_fault(lines, fault):
    async with an_openai_server(lines) as target:
        assert (await asked(target)).fault == fault


@pytest.mark.parametrize(
    ("lines", "ended"),
    [([delta("a"), {"error": {"message": "x"}}], "ERROR_EVENT"), ([delta("a"), USAGE], BROKEN)],
)
async def test_an_openai_stream_that_breaks_is_not_served(lines, ended):
    async with an_openai_server(lines) as target:
        assert (await asked(target)).ended == ended


async def test_an_openai_servers_refusal_is_told_by_its_status():
    async with an_openai_server([], status=429) as target:
        assert (await asked(target)).ended == "HTTP_429"


async def test_a_server_that_is_not_there_is_an_outcome():
    async with openai_target(
        "http://127.0.0.1:1", [""], model="m", temperature=0, clock=time.perf_counter
    ) as target:
        assert "Error" in (await asked(target)).ended
    async with grpc_target(
        "127.0.0.1:1", [KEY], model="", temperature=0, clock=time.perf_counter
    ) as target:
        assert (await asked(target, Request(0, "", "hi", 3, deadline_s=5))).ended == "UNAVAILABLE"
