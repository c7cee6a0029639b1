"""Whatever becomes of a request, its row says what it cost, and to whom that is charged."""

from datetime import UTC, datetime, timedelta

import grpc
import pytest

from noria.v1 import chat_pb2, worker_pb2
from tests.router.fakes import (
    EOS,
    FakeWorker,
    bearer,
    events,
    next_event,
    routed,
    spec,
    until,
)

# The fake tokenizer's prompt "hi" has two ids.
RAN = {"prompt_tokens": 2, "cached_tokens": 1, "computed_tokens": 5, "device_us": 700}


async def all_rows(setup):
    days = [(datetime.now(UTC) - timedelta(days=ago)).date().isoformat() for ago in (1, 0)]
    ledger = setup.router._store.ledger
    return [row for day in days for row in await ledger.rows(day)]


async def only_row(setup):
    """The one row, once nothing is held any more."""
    await setup.at_rest()
    await until(lambda: setup.router.state().ledger_waiting == 0)
    (row,) = await all_rows(setup)
    return row


def tokens(row):
    return (
        row.prompt_tokens, row.cached_tokens, row.generated_tokens, row.delivered_tokens,
        row.wasted_tokens, row.unconfirmed_tokens,
    )  # fmt: skip


async def text_until(call, count):
    """Read until so many pieces of text have come."""
    while count:
        count -= bool((await next_event(call)).content_block_delta.text)


async def test_served():
    async with routed() as setup:
        call = setup.stream()
        await setup.submitted(1)
        setup.worker.emit(1, 10, 11)
        setup.worker.finish(1, "eos", EOS, **RAN)
        await events(call)
        row = await only_row(setup)
    assert (row.outcome, row.tenant, row.model) == ("SERVED", "default", "fake-model")
    assert tokens(row) == (2, 1, 3, 3, 0, 0)
    assert row.device_us == 700
    assert row.request_id.startswith(f"req-{row.router_id}-")
    assert 0 <= row.ended_us - row.started_us < 60_000_000


async def test_a_cancelled_one_waits_for_the_workers_last_word():
    """What was computed after the cancel is waste of this request, and not lost."""
    async with routed() as setup:
        setup.worker.acknowledge_aborts = False
        call = setup.stream()
        await setup.submitted(1)
        setup.worker.emit(1, 10, 11)
        await text_until(call, 1)
        call.cancel()
        await until(lambda: setup.router.held()["requests"] == 0)
        assert await all_rows(setup) == []
        ledger = setup.router._store.ledger
        assert len(await ledger.open_rows(setup.router._instance_id)) == 1
        setup.worker.finish(1, "aborted", more=4, **RAN)
        row = await only_row(setup)
    assert row.outcome == "CANCELLED"
    assert tokens(row) == (2, 1, 6, 2, 4, 0)


async def test_one_whose_worker_is_lost_is_charged_what_it_got():
    async with routed() as setup:
        call = setup.stream()
        await setup.submitted(1)
        setup.worker.emit(1, 10, 11, cached=1)
        await text_until(call, 1)
        setup.worker.break_session()
        with pytest.raises(grpc.aio.AioRpcError):
            await events(call)
        row = await only_row(setup)
    assert row.outcome == "WORKER_LOST"
    assert tokens(row) == (2, 1, 2, 2, 0, 2)
    assert row.device_us == 0


async def test_an_attempt_that_was_lost_before_its_first_token_costs_nothing():
    async with routed() as setup:
        call = setup.stream()
        await setup.submitted(1)
        setup.worker.break_session()
        await setup.submitted(2)
        setup.worker.finish(1, "eos", EOS, **RAN)
        await events(call)
        row = await only_row(setup)
    assert row.outcome == "SERVED"
    assert tokens(row) == (2, 1, 1, 1, 0, 0)


async def test_what_a_failed_attempt_computed_counts_and_its_prompt_is_charged_once():
    async with routed(FakeWorker(), FakeWorker()) as setup:
        call = setup.stream()
        failing, other = await setup.holder()
        del failing.live[1]
        work = worker_pb2.Work(
            prompt_tokens=2, cached_tokens=0, output_tokens=3, computed_tokens=4, device_us=90
        )
        refused = worker_pb2.Refused(code=worker_pb2.REFUSAL_CODE_INTERNAL, work=work)
        failing._step(terminals=[worker_pb2.Terminal(submit_number=1, refused=refused)])
        await until(lambda: other.submits)
        other.finish(1, "eos", EOS, **RAN)
        await events(call)
        row = await only_row(setup)
    assert row.outcome == "SERVED"
    assert tokens(row) == (2, 1, 4, 1, 3, 0)
    assert row.device_us == 790


async def test_an_attempt_that_was_never_computed_costs_nothing():
    """Refused for want of room, and ended before its first step."""
    async with routed() as setup:
        call = setup.stream()
        await setup.submitted(1)
        setup.worker.refuse(1, worker_pb2.REFUSAL_CODE_FULL)
        setup.worker.say_load()
        await setup.submitted(2)
        setup.worker.finish(2, "expired", prompt_tokens=2)
        with pytest.raises(grpc.aio.AioRpcError):
            await events(call)
        row = await only_row(setup)
    assert row.outcome == "DEADLINE_EXCEEDED"
    assert tokens(row) == (0, 0, 0, 0, 0, 0)


async def test_what_was_not_admitted_and_what_generates_nothing_has_no_row():
    async with routed() as setup:
        for fields in ({"temperature": 9}, {"max_tokens": 10**6}, {"key": "wrong"}):
            with pytest.raises(grpc.aio.AioRpcError):
                await events(setup.stream(**fields))
        request = chat_pb2.CountTokensRequest(spec=spec("hi"))
        await setup.stub.CountTokens(request, metadata=bearer())
        await setup.at_rest()
        assert setup.router.state().ledger_waiting == 0
        assert await all_rows(setup) == []
