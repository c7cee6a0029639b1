"""What a worker tells of itself: present from the start, counted by its own steps."""

import pytest

from tests.support.scraping import scrape
from tests.support.waiting import until
from tests.support.worker_client import StepGate, worker_client
from worker.app import running_worker
from worker.config import WorkerConfig


@pytest.fixture
def config(golden_model, script_file):
    def make(**settings):
        path = script_file(mean_output_tokens=0)
        return WorkerConfig(
            golden_model, "demo", "127.0.0.1:0", "127.0.0.1:0", script=path, **settings
        )

    return make


async def test_a_worker_at_rest_has_all_its_series(config):
    async with running_worker(config(max_num_seqs=3, num_blocks=10, block_size=8)) as worker:
        await worker.ready()
        figures = await scrape(worker.metrics_address)
    assert figures["noria_worker_max_num_seqs",] == 3
    assert figures["noria_worker_kv_blocks",] == 10
    assert figures["noria_worker_kv_tokens",] == 80
    for name in ("running_sequences", "waiting_sequences", "kv_blocks_used", "kv_tokens_used"):
        assert figures[f"noria_worker_{name}",] == 0
    for name in ("steps", "preemptions", "generated_tokens", "prompt_tokens_computed"):
        assert figures[f"noria_worker_{name}_total",] == 0
    assert [name for name in figures if name[0] == "noria_worker_info" and "demo" in name]


async def test_while_it_loads_its_places_are_known_and_nothing_is_held(config):
    async with running_worker(config(max_num_seqs=3)) as worker:
        figures = await scrape(worker.metrics_address)
        await worker.ready()
    assert figures["noria_worker_max_num_seqs",] == 3
    assert figures["noria_worker_kv_blocks_used",] == 0
    assert figures["noria_worker_running_sequences",] == 0


async def test_steps_tokens_and_blocks_are_counted(config):
    """Seven prompt positions at once, then one a step; 4 blocks of 4 hold 13 positions."""
    async with running_worker(config(num_blocks=10, block_size=4)) as worker:
        facts = await worker.ready()
        gate = StepGate(facts.runner)
        async with worker_client(worker.address) as client:
            number = await client.submit(list(range(40, 47)), 8)
            gate.let_through(7)
            await client.until(lambda: len(client.ids[number]) == 7)
            figures = await scrape(worker.metrics_address)
            assert figures["noria_worker_running_sequences",] == 1
            assert figures["noria_worker_live_submits",] == 1
            assert figures["noria_worker_kv_blocks_used",] == 4
            assert figures["noria_worker_kv_tokens_used",] == 16
            gate.let_through(10)
            await client.finished(number)
            figures = await scrape(worker.metrics_address)
    assert figures["noria_worker_steps_total",] == 8
    assert figures["noria_worker_step_seconds_count",] == 8
    assert figures["noria_worker_step_tokens_sum",] == 7 + 7
    assert figures["noria_worker_prompt_tokens_computed_total",] == 7
    assert figures["noria_worker_generated_tokens_total",] == 8
    assert figures["noria_worker_kv_blocks_used",] == 0
    assert figures["noria_worker_live_submits",] == 0


async def test_preemptions_are_counted(config):
    small = {"num_blocks": 8, "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    async with running_worker(config(**small)) as worker:
        facts = await worker.ready()
        gate = StepGate(facts.runner)
        async with worker_client(worker.address) as client:
            numbers = [await client.submit([40 + n] * 6, 20) for n in range(2)]
            # Both are there before the first one's first step is over, and grow side by side.
            await until(lambda: worker.state().live_submits == 2)
            gate.let_through(100)
            await client.finished(*numbers)
            figures = await scrape(worker.metrics_address)
    assert figures["noria_worker_preemptions_total",] > 0
    assert figures["noria_worker_prompt_tokens_computed_total",] >= 12
    assert figures["noria_worker_generated_tokens_total",] == 40
    assert figures["noria_worker_kv_blocks_used",] == 0


async def test_a_failing_batch_is_counted(golden_model, script_file):
    fault = {
        "prompt_token_ids": [5, 9],
        "output_token_ids": [40, 41],
        "faults": {"1": {"kind": "raise"}},
    }
    config = WorkerConfig(
        golden_model, "demo", "127.0.0.1:0", "127.0.0.1:0", script=script_file([fault])
    )
    async with running_worker(config) as worker:
        await worker.ready()
        async with worker_client(worker.address) as client:
            await client.finished(await client.submit([5, 9], 4))
            figures = await scrape(worker.metrics_address)
    assert figures["noria_worker_failed_batches_total",] == 1
