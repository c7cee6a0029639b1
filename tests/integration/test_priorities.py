"""Batch work of the lowest priority does not make anybody else wait for its end."""

import asyncio

import pytest

from tests.support.stack import running_stack
from tests.support.waiting import until

BATCH = -100


@pytest.fixture
async def stack(golden_model, script_file):
    script = script_file(mean_output_tokens=0)
    async with running_stack(
        golden_model, script=script, max_num_seqs=2, max_num_batched_tokens=64, num_workers=1
    ) as running:
        yield running


async def test_a_request_of_a_higher_priority_enters_a_batch_that_is_full_of_lower_ones(stack):
    """All places are taken and more waits."""
    scheduler, (steps,) = stack.workers[0].scheduler, stack.steps
    batch = [
        asyncio.create_task(
            stack.client.chat("네", max_tokens=150, priority=BATCH, seed=number, ignore_eos=True)
        )
        for number in range(4)
    ]
    await until(lambda: scheduler.num_running == 2 and scheduler.num_waiting == 1)
    before = len(steps)
    urgent = [stack.client.chat("토마토", max_tokens=3, ignore_eos=True) for _ in range(4)]
    answers = await asyncio.gather(*urgent)
    assert [answer.usage.output_tokens for answer in answers] == [3] * 4
    assert not any(task.done() for task in batch)
    assert len(steps) - before < 100
    assert scheduler.num_preemptions <= 4
    done = await asyncio.gather(*batch)
    assert [answer.usage.output_tokens for answer in done] == [150] * 4
    assert scheduler.num_preemptions <= 4
    assert set(stack.held().values()) == {0}
