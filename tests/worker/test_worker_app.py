"""A whole worker on loopback, with a scripted model: the wire's promises, and nothing left over."""

import asyncio

import grpc
import pytest
import structlog

from noria.service.channel import CLIENT_OPTIONS
from noria.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.support.worker_client import record_steps, worker_client
from worker.app import running_worker
from worker.config import WorkerConfig


@pytest.fixture
def config(golden_model, script_file):
    def make(scripts=(), *, script=None, **settings):
        path = script_file(scripts, **(script or {"mean_output_tokens": 0}))
        return WorkerConfig(model=golden_model, script=path, listen="127.0.0.1:0", **settings)

    return make


def is_empty(scheduler):
    return (scheduler.num_running, scheduler.num_waiting, scheduler.pool.num_used) == (0, 0, 0)


async def test_hello_states_what_the_worker_can_hold(config):
    async with running_worker(config(max_num_seqs=3, num_blocks=10, block_size=8)) as worker:
        await worker.ready()
        async with worker_client(worker.address) as client:
            hello = client.hello
            assert (hello.max_num_seqs, hello.block_size, hello.num_blocks) == (3, 8, 10)
            assert hello.max_model_len == 80
            assert hello.model == "golden"
            assert len(hello.vocab_fingerprint) == 64
            assert len(hello.instance_id) == 16


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "one step ahead"])
async def test_a_script_is_replayed_and_continued_output_counts_as_output(config, ahead):
    scripts = [{"prompt_token_ids": [5, 9], "output_token_ids": [40, 41, 42, 43, 2]}]
    async with running_worker(config(scripts, async_scheduling=ahead)) as worker:
        facts = await worker.ready()
        async with worker_client(worker.address) as client:
            sampling = common_pb2.SamplingParams(temperature=1.0, seed=3)
            number = await client.submit([5, 9], 10, sampling=sampling)
            assert await client.finished(number) == [[40, 41, 42, 43, 2]]
            finished = client.terminals[number].finished
            assert finished.finish_reasons == [worker_pb2.FINISH_REASON_EOS]
            assert (finished.prompt_tokens, finished.output_tokens[0]) == (2, 5)
            assert finished.computed_tokens == 6 + ahead
            so_far = [worker_pb2.OutputTokens(ids=[40, 41])]
            number = await client.submit([5, 9], 4, outputs=so_far, sampling=sampling)
            assert await client.finished(number) == [[42, 43]]
            finished = client.terminals[number].finished
            assert finished.finish_reasons == [worker_pb2.FINISH_REASON_LENGTH]
            assert finished.output_tokens == [4]
        assert is_empty(facts.scheduler)


async def test_a_stop_id_and_an_ignored_eos_do_as_they_say(config):
    scripts = [{"prompt_token_ids": [5], "output_token_ids": [2, 40, 41]}]
    async with running_worker(config(scripts)) as worker:
        await worker.ready()
        async with worker_client(worker.address) as client:
            sampling = common_pb2.SamplingParams(ignore_eos=True, stop_token_ids=[40])
            number = await client.submit([5], 10, sampling=sampling)
            assert await client.finished(number) == [[2, 40]]
            reasons = client.terminals[number].finished.finish_reasons
            assert reasons == [worker_pb2.FINISH_REASON_STOP_ID]


async def test_thirty_two_at_once_equal_their_solo_runs_over_a_pool_for_four(config):
    lengths = [5 + (i * 211) % 896 for i in range(31)] + [900]
    requests = [
        ([(i * 131 + at * 7) % 21_000 for at in range(length)], 3 + (i * 37) % 118)
        for i, length in enumerate(lengths)
    ]
    async with running_worker(config(max_num_seqs=32)) as worker:
        await worker.ready()
        async with worker_client(worker.address) as client:
            solo = [await client.generate(*request) for request in requests]
    small = config(
        max_num_seqs=32, num_blocks=4 * 64, max_model_len=1024, max_num_batched_tokens=96
    )
    async with running_worker(small) as worker:
        facts = await worker.ready()
        outputs = record_steps(facts.runner)
        async with worker_client(worker.address) as client:
            pending, together = dict(enumerate(requests)), {}
            numbers = {}
            while pending or numbers:
                for index in list(pending):
                    numbers[await client.submit(*pending.pop(index))] = index
                done = await _any_terminal(client, numbers)
                for number in done:
                    index = numbers.pop(number)
                    if client.terminals[number].HasField("refused"):
                        pending[index] = requests[index]
                    else:
                        together[index] = client.ids[number]
        assert [together[index] for index in range(32)] == solo
        assert is_empty(facts.scheduler)
    assert facts.runner.num_positions_fed == sum(output.num_tokens for output in outputs)
    _check_decodes_advance(outputs)


async def _any_terminal(client, numbers):
    await client.until(lambda: any(number in client.terminals for number in numbers))
    return [number for number in numbers if number in client.terminals]


def _check_decodes_advance(outputs):
    """After its first token a sequence is in every step, unless it was preempted: then it
    comes back from its last full block that is still cached, or from position 0."""
    last_step = {}
    for output in outputs:
        for entry in output.scheduled:
            gap = output.step - last_step.get(entry.sequence_id, output.step - 1)
            assert gap == 1 or entry.first_position % 16 == 0
            if entry.draw is not None or entry.sequence_id in last_step:
                last_step[entry.sequence_id] = output.step


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_an_abort_frees_everything_by_the_end_of_the_running_step(config, phase):
    script = {"mean_output_tokens": 0, "step_seconds": 0.01}
    async with running_worker(config(script=script, max_num_batched_tokens=32)) as worker:
        facts = await worker.ready()
        outputs = record_steps(facts.runner)
        async with worker_client(worker.address) as client:
            prompt = [7] * (2000 if phase == "prefill" else 3)
            number = await client.submit(prompt, 1000)
            await client.until(lambda: len(outputs) > 3 or client.ids[number])
            steps_before = client.load.step_count
            await client.abort(number)
            await client.finished(number)
            finished = client.terminals[number].finished
            assert finished.finish_reasons == [worker_pb2.FINISH_REASON_ABORTED]
            assert is_empty(facts.scheduler)
            assert client.load.step_count - steps_before < 20
            assert len(await client.generate([3, 4], 5)) == 5


async def test_a_lost_session_frees_everything_and_the_next_starts_empty(config):
    script = {"mean_output_tokens": 0, "step_seconds": 0.005}
    async with running_worker(config(script=script)) as worker:
        facts = await worker.ready()
        async with worker_client(worker.address) as client:
            numbers = [await client.submit([n], 4000) for n in range(20)]
            await client.until(lambda: all(client.ids[number] for number in numbers))
        async with worker_client(worker.address) as client:
            assert len(await client.generate([3, 4], 5)) == 5
            await client.until(lambda: client.load.running == 0)
            assert is_empty(facts.scheduler)


async def test_a_batch_that_raises_fails_only_its_own_and_the_worker_goes_on(config):
    scripts = [
        {"prompt_token_ids": [5], "output_token_ids": [40, 41], "faults": {"1": {"kind": "raise"}}}
    ]
    failures = []

    def fail(failure):
        failures.append(structlog.contextvars.get_contextvars())

    async with running_worker(config(scripts), on_failure=fail) as worker:
        facts = await worker.ready()
        async with worker_client(worker.address) as client:
            number = await client.submit([5], 10, traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
            await client.finished(number)
            assert client.terminals[number].refused.code == worker_pb2.REFUSAL_CODE_INTERNAL
            assert client.ids[number] == [40]
            assert len(await client.generate([6], 4)) == 4
        assert is_empty(facts.scheduler)
    assert failures == [{"trace_ids": ["a" * 32]}]


async def test_a_deadline_ends_running_work(config):
    """GRP-08."""
    script = {"mean_output_tokens": 0, "step_seconds": 0.01}
    async with running_worker(config(script=script)) as worker:
        facts = await worker.ready()
        async with worker_client(worker.address) as client:
            number = await client.submit([5], 4000, deadline_ms=100)
            await client.finished(number)
            reasons = client.terminals[number].finished.finish_reasons
            assert reasons == [worker_pb2.FINISH_REASON_EXPIRED]
            assert 0 < len(client.ids[number]) < 100
        assert is_empty(facts.scheduler)


async def test_load_comes_also_while_a_step_hangs(config):
    scripts = [
        {
            "prompt_token_ids": [5],
            "output_token_ids": [40, 41],
            "faults": {"1": {"kind": "sleep", "seconds": 1.5}},
        }
    ]
    async with running_worker(config(scripts)) as worker:
        await worker.ready()
        async with worker_client(worker.address) as client:
            await client.submit([5], 10)
            await client.until(lambda: client.load and client.load.step_age_ms >= 500, timeout=5)
            assert client.load.running == 1


async def test_draining_refuses_new_work_and_finishes_the_old(config):
    script = {"mean_output_tokens": 0, "step_seconds": 0.005}
    async with running_worker(config(script=script)) as worker:
        await worker.ready()
        async with worker_client(worker.address) as client:
            old = await client.submit([5], 60)
            await client.until(lambda: client.ids[old])
            draining = asyncio.create_task(worker.drain(grace_s=20))
            await client.until(lambda: client.load.draining)
            new = await client.submit([6], 5)
            await client.finished(old, new)
            assert len(client.ids[old]) == 60
            assert client.terminals[new].refused.code == worker_pb2.REFUSAL_CODE_DRAINING
            assert await draining == 0


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (worker_pb2.SessionRequest(abort=worker_pb2.Abort()), grpc.StatusCode.INVALID_ARGUMENT),
        (
            worker_pb2.SessionRequest(hello=worker_pb2.RouterHello(protocol_version=9)),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
    ],
)
async def test_a_session_that_begins_wrong_is_refused(config, first, code):
    async with running_worker(config()) as worker:
        await worker.ready()
        async with grpc.aio.insecure_channel(worker.address, options=CLIENT_OPTIONS) as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Session()
            await call.write(first)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is code


async def test_worker_info_tells_what_runs(config):
    async with running_worker(config()) as worker:
        await worker.ready()
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            info = await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
    assert (info.attention_backend, info.dtype) == ("scripted", "scripted")
    assert (info.hidden_size, info.vocab_size) == (3584, 21880)
    assert info.hello.row_exact


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_model_len": 5000}, "max_model_len 5000 exceeds the model's 4096 positions"),
        ({"max_model_len": 100, "num_blocks": 5, "block_size": 16}, "exceeds the 80 tokens"),
    ],
)
async def test_settings_that_contradict_each_other_fail_at_start(config, settings, says):
    async with running_worker(config(**settings)) as worker:
        with pytest.raises(ValueError, match=says):
            await worker.ready()
