"""A cancelled request costs nothing from the end of the running step on, wherever it was."""

import asyncio

import pytest

from noria import RequestCancelledError
from tests.support.stack import running_stack
from tests.support.waiting import until
from tests.support.worker_client import StepGate
from worker.engine_thread import EngineThread

LONG = "토마토는 과일이야? " * 40


@pytest.fixture
def aborts(monkeypatch):
    """Sequence ids whose aborts have arrived at the worker."""
    arrived = []
    abort = EngineThread.abort

    def recording(thread, sequence_id):
        arrived.append(sequence_id)
        abort(thread, sequence_id)

    monkeypatch.setattr(EngineThread, "abort", recording)
    return arrived


@pytest.fixture
async def stack(golden_model, script_file):
    script = script_file(mean_output_tokens=0)
    async with running_stack(
        golden_model, script=script, max_num_seqs=1, max_num_batched_tokens=64
    ) as running:
        yield running


async def close(stack, stream, reading):
    """Close the stream by leaving its block."""
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await stream.__aexit__(None, None, None)


async def cancel_request(stack, stream, reading):
    """Cancel by id; the stream ends with CANCELLED."""
    await stack.client.cancel(stream.request_id)
    with pytest.raises(RequestCancelledError) as caught:
        await reading
    assert caught.value.request_id == stream.request_id


async def read_all(stream):
    async for _ in stream.events():
        pass


def is_at_rest(stack):
    return set(stack.held().values()) == {0}


async def answer_of(stack, text="네", **options):
    result = await stack.client.chat(text, max_tokens=3, **options)
    return result.usage.output_tokens


WAYS = pytest.mark.parametrize("cancel", [close, cancel_request])


@WAYS
async def test_in_prefill(stack, aborts, cancel):
    """CAN-02."""
    gate, (steps,) = StepGate(stack.workers[0].runner), stack.steps
    stream = await stack.client.stream_chat(LONG, max_tokens=500).__aenter__()
    reading = asyncio.create_task(read_all(stream))
    gate.let_through(1)
    await until(lambda: len(steps) == 1 and gate.holds_one)
    await cancel(stack, stream, reading)
    await until(lambda: aborts)
    gate.let_through(1)
    await until(lambda: is_at_rest(stack))
    assert len(steps) == 2
    assert all(entry.draw is None for output in steps for entry in output.scheduled)
    gate.let_through(100)
    assert await answer_of(stack) == 3


@WAYS
async def test_in_decode(stack, aborts, cancel):
    gate, (steps,) = StepGate(stack.workers[0].runner), stack.steps
    stream = await stack.client.stream_chat("네", max_tokens=500).__aenter__()
    reading = asyncio.create_task(read_all(stream))
    gate.let_through(5)
    await until(lambda: len(steps) == 5 and gate.holds_one)
    await cancel(stack, stream, reading)
    await until(lambda: aborts)
    gate.let_through(1)
    await until(lambda: is_at_rest(stack))
    assert len(steps) == 6
    gate.let_through(100)
    assert await answer_of(stack) == 3


@WAYS
async def test_while_queued_nothing_is_ever_computed_for_it(stack, cancel):
    """CAN-01."""
    gate, (steps,) = StepGate(stack.workers[0].runner), stack.steps
    first = asyncio.create_task(answer_of(stack))
    gate.let_through(1)
    await until(lambda: len(steps) == 1 and gate.holds_one)
    # One may wait at the worker by its look-ahead; the third waits in the router.
    second = asyncio.create_task(answer_of(stack))
    await until(lambda: stack.held()["requests"] == 2 and stack.held()["permits"] == 0)
    stream = await stack.client.stream_chat(LONG, max_tokens=500).__aenter__()
    reading = asyncio.create_task(read_all(stream))
    await until(lambda: stack.held()["permits"] == 1)
    await cancel(stack, stream, reading)
    await until(lambda: stack.held()["permits"] == 0)
    gate.let_through(100)
    assert (await first, await second) == (3, 3)
    await until(lambda: is_at_rest(stack))
    assert sum(output.num_tokens for output in steps) < 20


async def test_an_unknown_and_a_repeated_cancel_are_harmless(stack):
    """CAN-04."""
    async with stack.client.stream_chat("네", max_tokens=3) as stream:
        await read_all(stream)
    await stack.client.cancel(stream.request_id)
    await stack.client.cancel(stream.request_id)
    assert await answer_of(stack) == 3
