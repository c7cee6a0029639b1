"""Real processes that are told to stop, killed and restarted under load."""

import asyncio
import hashlib
import signal

import grpc
import pytest

from noria import Reason, WorkerLostError
from tests.support.processes import address, exit_code, fleet
from tests.support.stack import API_KEY
from tests.support.waiting import until

LETTERS = [32, 127]
NUM_STREAMS = 16
MAX_TOKENS = 60
FLAGS = ("--max-num-seqs", "8", "--num-blocks", "512", "--block-size", "16")


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys.toml"
    digest = hashlib.sha256(API_KEY.encode()).hexdigest()
    path.write_text(f'[[tenants]]\nname = "t"\n[[tenants.keys]]\nsha256 = "{digest}"\n')
    return path


@pytest.fixture
def script(script_file):
    """Answers of the full length, 5 ms a token."""
    return script_file(mean_output_tokens=0, step_seconds=0.005, token_ids=LETTERS)


class Load:
    """Streams that run at the same time; `begun` when each has its first text."""

    def __init__(self, client, count=NUM_STREAMS):
        self._client = client
        self.texts = [""] * count
        self._waiting = count
        self.begun = asyncio.Event()
        self.tasks = [asyncio.create_task(self._stream(index)) for index in range(count)]

    async def _stream(self, index):
        async with self._client.stream_chat(
            f"Question {index}", max_tokens=MAX_TOKENS, seed=index, timeout=60
        ) as stream:
            async for piece in stream:
                if not self.texts[index]:
                    self._waiting -= 1
                    if not self._waiting:
                        self.begun.set()
                self.texts[index] += piece
            return stream.result

    @property
    def num_running(self):
        """How many have a text and have not ended."""
        return sum(
            bool(text) and not task.done()
            for text, task in zip(self.texts, self.tasks, strict=True)
        )

    async def results(self):
        """What each gave, or how it failed."""
        return await asyncio.gather(*self.tasks, return_exceptions=True)


def check_served(results):
    """Each was served, in its full length."""
    assert [repr(result) for result in results if isinstance(result, BaseException)] == []
    assert {result.usage.output_tokens for result in results} == {MAX_TOKENS}


async def test_each_service_told_to_stop_under_load_fails_no_stream_and_exits_0(
    golden_model, script, keys_file
):
    """One after the other: a worker, the tokenizer (started again), the router."""
    async with fleet(golden_model, script, keys_file, worker_flags=FLAGS) as running:
        load = Load(running.client)
        await load.begun.wait()
        assert await exit_code(running.children["worker 0"]) == 0
        check_served(await load.results())

        load = Load(running.client, count=8)
        await load.begun.wait()
        tokenizer = running.children["tokenizer"]
        assert await exit_code(tokenizer) == 0
        check_served(await load.results())
        await running.start_tokenizer(await address(tokenizer), "tokenizer again")

        load = Load(running.client, count=8)
        await load.begun.wait()
        assert await exit_code(running.children["router"]) == 0
        check_served(await load.results())
    for name in ("router", "tokenizer", "worker 0", "worker 1"):
        told = [event["event"] for event in running.events[name]]
        assert told.index("ready") < told.index("draining") < told.index("stopped"), name
    lost = [e for e in running.events["router"] if e.get("outcome") not in (None, "SERVED")]
    assert lost == []


async def test_a_killed_worker_costs_only_the_streams_that_had_begun_there(
    golden_model, script, keys_file
):
    """Requests without a first token finish on the other; the rest tell how far they came."""
    async with fleet(golden_model, script, keys_file, worker_flags=FLAGS) as running:
        await until(lambda: running.count("router", "worker_connected") == 2)
        load = Load(running.client, count=40)
        # More than one worker holds: some run on either.
        await until(lambda: load.num_running > 8)
        await exit_code(running.children["worker 0"], signal.SIGKILL)
        results = await load.results()
        lost = [result for result in results if isinstance(result, BaseException)]
        assert 0 < len(lost) <= 8
        for error in lost:
            assert isinstance(error, WorkerLostError)
            assert error.reason is Reason.WORKER_LOST
            assert error.code is grpc.StatusCode.UNAVAILABLE
            assert error.timeline.usage.input_tokens > 0
        assert max(error.timeline.usage.output_tokens for error in lost) > 0
        check_served([result for result in results if not isinstance(result, BaseException)])
        assert (await running.client.chat("again", max_tokens=3)).usage.output_tokens == 3


async def test_a_tokenizer_that_is_killed_and_comes_back_leaves_no_trace_in_any_text(
    golden_model, script, keys_file
):
    """No gap, no repetition: each text is what it is when nothing happens."""
    async with fleet(golden_model, script, keys_file, num_workers=1, worker_flags=FLAGS) as running:
        load = Load(running.client, count=8)
        undisturbed = [result.text for result in await load.results()]
        load = Load(running.client, count=8)
        await load.begun.wait()
        tokenizer = running.children["tokenizer"]
        await exit_code(tokenizer, signal.SIGKILL)
        await running.start_tokenizer(await address(tokenizer), "tokenizer again")
        results = await load.results()
        check_served(results)
        assert [result.text for result in results] == undisturbed
        assert load.texts == undisturbed
