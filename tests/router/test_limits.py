"""A tenant's limits at a running router that is alone."""

import asyncio
import contextlib
import hashlib
import time

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2, status_pb2

from noria.reasons import Reason
from noria.service.errors import DETAILS_KEY
from noria.v1 import chat_pb2, common_pb2
from router.servicer import ChatServicer
from router.store.redis_limits import limits_key
from tests.router.fakes import (
    EOS,
    FakeClock,
    bearer,
    events,
    failure,
    kinds,
    next_event,
    refusal,
    routed,
    spec,
    until,
)
from tests.support.suspensions import Suspensions, for_each

KEY = "limited"


@contextlib.asynccontextmanager
async def limited(tmp_path, *, clock=None, more=None, **limits):
    """A router with one tenant; without a clock of its own time stands still."""
    path = tmp_path / "keys.toml"
    fields = "\n".join(f"{name} = {value}" for name, value in limits.items())
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path.write_text(f'[[tenants]]\nname = "t"\n{fields}\n[[tenants.keys]]\nsha256 = "{digest}"\n')
    settings = {
        "api_key_sha256": "",
        "keys_file": path,
        "keys_poll_s": 0.01,
        "max_queued_requests": 8,
    }
    async with routed(clock=clock or FakeClock(), **settings, **(more or {})) as setup:
        yield setup


def ask(setup, **fields):
    return setup.stream(key=KEY, **fields)


async def refused(call):
    """Reason, seconds to wait, and what the quota failure names."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(10):
            await (events(call) if hasattr(call, "read") else call)
    error = refusal(caught.value)
    raw = dict(caught.value.trailing_metadata())[DETAILS_KEY]
    quota = error_details_pb2.QuotaFailure()
    for detail in status_pb2.Status.FromString(raw).details:
        detail.Unpack(quota)
    told = [(each.subject, each.description) for each in quota.violations]
    return caught.value.code(), error.reason, error.retry_after_s, told


async def finish(setup, number, call):
    setup.worker.finish(number, "eos", EOS)
    assert kinds(await events(call))[-1] == "message_stop"


async def test_requests_beyond_the_rate_are_refused_before_any_work_until_it_refills(tmp_path):
    clock = FakeClock()
    async with limited(tmp_path, clock=clock, requests_per_minute=2) as setup:
        setup.worker.auto = [10]
        for _ in range(2):
            assert kinds(await events(ask(setup)))[-1] == "message_stop"
        assert await refused(ask(setup)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            Reason.REQUESTS_PER_MINUTE,
            30.0,
            [("requests_per_minute", "1 more needed, 0 left of 2")],
        )
        assert len(setup.tokenizer.encoded) == 2
        clock.now += 30
        setup.worker.say_load()
        assert kinds(await events(ask(setup)))[-1] == "message_stop"


async def test_tokens_are_reserved_while_a_request_runs_and_settled_when_it_ends(tmp_path):
    """Two prompt tokens and sixty of output are held; three of these were used."""
    async with limited(tmp_path, tokens_per_minute=100) as setup:
        first = ask(setup, max_tokens=60)
        await setup.submitted(1)
        assert await refused(ask(setup, max_tokens=60)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            Reason.TOKENS_PER_MINUTE,
            pytest.approx((61 - 38) * 0.6),
            [("tokens_per_minute", "61 more needed, 38 left of 100")],
        )
        setup.worker.emit(1, 10, 11)
        await finish(setup, 1, first)
        second = ask(setup, max_tokens=93)
        await setup.submitted(2)
        assert await tokens_left(setup) == 100 - 5 - 95
        await finish(setup, 2, second)
        assert await tokens_left(setup) == 100 - 5 - 3


async def tokens_left(setup):
    """What the dry run says is left; it asks for a full bucket."""
    request = chat_pb2.EstimateChatRequest(spec=spec(max_tokens=98))
    told = await setup.stub.EstimateChat(request, metadata=bearer(KEY), timeout=20)
    assert told.refusal
    return int(told.refusal_message.split(", ")[1].split(" ")[0])


async def test_an_estimate_says_what_admission_would_and_takes_nothing(tmp_path):
    async with limited(
        tmp_path, requests_per_minute=1, tokens_per_minute=64, concurrent_requests=1
    ) as setup:
        for max_tokens, refusal_of in ((62, 0), (62, 0), (63, Reason.LIMIT_UNATTAINABLE)):
            request = chat_pb2.EstimateChatRequest(spec=spec(max_tokens=max_tokens))
            told = await setup.stub.EstimateChat(request, metadata=bearer(KEY), timeout=20)
            assert told.refusal == (refusal_of and wire(refusal_of))
        running = ask(setup, max_tokens=62)
        await setup.submitted(1)
        request = chat_pb2.EstimateChatRequest(spec=spec(max_tokens=1))
        told = await setup.stub.EstimateChat(request, metadata=bearer(KEY), timeout=20)
        # A request per minute waits longest of all that would refuse.
        assert told.refusal == wire(Reason.REQUESTS_PER_MINUTE)
        await finish(setup, 1, running)


def wire(reason):
    return common_pb2.Reason.Value(f"REASON_{reason}")


@pytest.mark.parametrize(
    ("fields", "field", "numbers"),
    [({"max_tokens": 99}, "max_tokens", ("101", "100")), ({"n": 4}, "n", ("4", "3"))],
)
async def test_what_can_never_pass_is_invalid_and_names_both_numbers(
    tmp_path, fields, field, numbers
):
    async with limited(tmp_path, tokens_per_minute=100, concurrent_requests=3) as setup:
        code, error = await failure(ask(setup, **fields))
        assert (code, error.reason) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            Reason.LIMIT_UNATTAINABLE,
        )
        assert [name for name, _ in error.fields] == [field]
        assert all(number in error.message for number in numbers)
        assert not setup.worker.submits


async def test_what_no_worker_took_costs_nothing(tmp_path):
    """Cancelled in the queue, refused by the tokenizer, too long: all comes back."""
    async with limited(tmp_path, requests_per_minute=1, tokens_per_minute=500) as setup:
        setup.tokenizer.encode_gate.clear()
        waiting = ask(setup, max_tokens=200)
        await until(lambda: setup.tokenizer.encoded)
        assert (await refused(ask(setup)))[1] is Reason.REQUESTS_PER_MINUTE
        waiting.cancel()
        setup.tokenizer.encode_gate.set()
        await setup.at_rest()
        setup.tokenizer.prompt_ids = [1] * 998
        _, error = await failure(ask(setup, max_tokens=3))
        assert error.reason is Reason.CONTEXT_LENGTH_EXCEEDED
        setup.tokenizer.prompt_ids = None
        last = ask(setup, max_tokens=498)
        await setup.submitted(1)
        await finish(setup, 1, last)


async def test_a_cancelled_request_pays_for_what_was_computed(tmp_path):
    async with limited(tmp_path, tokens_per_minute=100) as setup:
        call = ask(setup, max_tokens=90)
        await setup.submitted(1)
        setup.worker.emit(1, 10, 11, 12)
        while (await next_event(call)).WhichOneof("event") != "content_block_delta":
            pass
        call.cancel()
        await setup.at_rest()
        assert await tokens_left(setup) == 100 - 2 - 3


async def test_each_choice_is_one_of_the_concurrent_requests(tmp_path):
    """SEC-09."""
    async with limited(tmp_path, concurrent_requests=3) as setup:
        first = ask(setup, n=2)
        await setup.submitted(1)
        assert await refused(ask(setup, n=2)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            Reason.CONCURRENT_REQUESTS,
            1.0,
            [("concurrent_requests", "2 more needed, 1 left of 3")],
        )
        second = ask(setup)
        await setup.submitted(2)
        await finish(setup, 2, second)
        first.cancel()
        await setup.at_rest()
        third = ask(setup, n=3)
        await setup.submitted(3)
        third.cancel()


async def test_one_prompt_too_many_is_not_encoded(tmp_path):
    async with limited(tmp_path, concurrent_encodes=1) as setup:
        setup.tokenizer.encode_gate.clear()
        first = ask(setup)
        await until(lambda: setup.tokenizer.encoded)
        count = chat_pb2.CountTokensRequest(spec=spec())
        calls = [ask(setup), setup.stub.CountTokens(count, metadata=bearer(KEY), timeout=20)]
        for call in calls:
            assert (await refused(call))[1:] == (
                Reason.CONCURRENT_ENCODES,
                1.0,
                [("concurrent_encodes", "1 more needed, 0 left of 1")],
            )
        setup.tokenizer.encode_gate.set()
        await setup.submitted(1)
        second = ask(setup)
        await setup.submitted(2)
        assert len(setup.tokenizer.encoded) == 2
        await finish(setup, 1, first)
        await finish(setup, 2, second)


async def test_a_tenant_fills_no_more_than_its_share_of_the_queue(tmp_path):
    """Two of eight places; what a worker took waits no longer and may be followed."""
    async with limited(tmp_path, queue_share=0.25) as setup:
        running = [ask(setup, n=3)]
        await setup.submitted(1)
        setup.worker.say_load(running=3)
        running.append(ask(setup, n=2))
        await setup.submitted(2)
        setup.worker.say_load(running=3, waiting=2)
        waiting = [ask(setup) for _ in range(2)]
        await until(lambda: setup.router.held()["permits"] == 2)
        code, reason, retry_s, told = await refused(ask(setup))
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_SHARE)
        assert retry_s >= 1
        assert told == [("queue_share", "2 requests wait, at most 2 of the queue's places")]
        for call in (*running, *waiting):
            call.cancel()


async def test_a_prompt_of_ids_needs_no_place_for_encoding_and_is_priced_exactly(tmp_path):
    async with limited(tmp_path, tokens_per_minute=10, concurrent_encodes=1) as setup:
        setup.worker.auto = [10]

        def complete(ids):
            made = chat_pb2.CompletionSpec(token_ids={"ids": ids}, max_tokens=4)
            request = chat_pb2.CompletionRequest(spec=made)
            return setup.stub.Completion(request, metadata=bearer(KEY), timeout=20)

        await complete([5] * 6)
        _, error = await failure(complete([5] * 7))
        assert error.reason is Reason.LIMIT_UNATTAINABLE
        assert await refused(complete([5] * 6)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            Reason.TOKENS_PER_MINUTE,
            48.0,
            [("tokens_per_minute", "10 more needed, 2 left of 10")],
        )


async def test_a_long_text_is_refused_by_its_size_alone(tmp_path):
    """An eighth of its bytes, in tokens, is held against the limit before it is encoded."""
    async with limited(tmp_path, tokens_per_minute=1000) as setup:
        running = ask(setup, max_tokens=900)
        await setup.submitted(1)
        _, reason, _, told = await refused(ask(setup, text="x" * 2400, max_tokens=1))
        assert reason is Reason.TOKENS_PER_MINUTE
        assert told[0][1].endswith(" 98 left of 1000")
        assert len(setup.tokenizer.encoded) == 1
        await finish(setup, 1, running)


async def test_a_new_keys_file_changes_the_limits_of_who_runs(tmp_path):
    """What runs keeps what it holds, and counts under the new limit."""
    async with limited(tmp_path, concurrent_requests=5) as setup:
        calls = [ask(setup) for _ in range(2)]
        await setup.submitted(2)
        path = tmp_path / "keys.toml"
        text = path.read_text().replace("concurrent_requests = 5", "concurrent_requests = 2")
        (tmp_path / "fresh").write_text(text)
        (tmp_path / "fresh").replace(path)

        await until(lambda: limit_of(setup) == 2)
        assert (await refused(ask(setup)))[1] is Reason.CONCURRENT_REQUESTS
        for call in calls:
            call.cancel()


async def test_cancelled_at_any_await_nothing_stays_taken_in_redis(
    tmp_path, redis_url, shared_redis_server, monkeypatch
):
    """What was computed stays charged, and the request that a worker took; no more, no less."""
    suspensions = Suspensions(monkeypatch)
    suspensions.watch_call(ChatServicer, "StreamChat")
    fields = {"tokens_per_minute": 10**6, "concurrent_requests": 1, "concurrent_encodes": 1}
    more = {"redis_url": redis_url, "redis_timeout_s": 5}
    with structlog.testing.capture_logs() as lines:
        async with limited(tmp_path, clock=time.monotonic, more=more, **fields) as setup:
            setup.worker.auto = [10, 11]

            def begin():
                call = ask(setup, max_tokens=50)
                return call, events(call)

            async def check():
                await setup.at_rest()
                # One place: it is refused unless all has come back.
                assert kinds(await events(ask(setup)))[-1] == "message_stop"
                await setup.at_rest()

            assert await for_each(suspensions, begin, check) >= 9
            await until(lambda: not setup.router.state().sharing.untold)
            with shared_redis_server.client() as client:
                stored = client.hgetall(limits_key("t"))
    (account,) = [value.split() for name, value in stored.items() if name.startswith("r:")]
    _, concurrent, encodes, requests, tokens, open_tokens, _ = map(int, account)
    told = [line for line in lines if line["event"] == "request"]
    begun = [line for line in told if line["attempts"]]
    used = sum(
        line["input_tokens"] + line["output_tokens"] + line["wasted_tokens"] for line in begun
    )
    assert (concurrent, encodes, open_tokens) == (0, 0, 0)
    assert (requests, tokens) == (len(begun), used)
    assert len(told) > len(begun)


def limit_of(setup):
    return setup.router._keys.ring.authenticate(bearer(KEY)).tenant.limits.concurrent_requests
