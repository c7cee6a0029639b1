"""Many requests at once: nobody gets another's tokens, and nothing is left behind."""

import asyncio
import random

from noria import NoriaError
from tests.support.stack import running_stack
from tests.support.waiting import until

# Printable ASCII in the fixture tokenizer.
LETTERS = [32, 127]


def question(index):
    return f"Question {index}: " + "토마토 " * (index * 7 % 60)


async def ask(client, index, **options):
    return await client.chat(question(index), max_tokens=3 + index % 40, seed=index, **options)


async def test_streams_together_equal_the_same_streams_alone(golden_model, script_file):
    script = script_file(mean_output_tokens=30, token_ids=LETTERS)
    async with running_stack(golden_model, script=script, max_num_seqs=16) as stack:
        alone = [await ask(stack.client, index) for index in range(32)]
        together = await asyncio.gather(*(ask(stack.client, index) for index in range(32)))
        assert set(stack.held().values()) == {0}
    assert len({result.text for result in alone}) == 32
    for one, many in zip(alone, together, strict=True):
        assert (one.text, one.stop_reason) == (many.text, many.stop_reason)
        assert one.usage.input_tokens == many.usage.input_tokens
        assert one.usage.output_tokens == many.usage.output_tokens


async def test_a_small_pool_serves_everybody_in_the_end(golden_model, script_file):
    script = script_file(mean_output_tokens=0, token_ids=LETTERS)
    small = {"num_blocks": 24, "block_size": 16, "max_num_batched_tokens": 64}
    async with running_stack(golden_model, script=script, **small) as stack:
        results = await asyncio.gather(*(ask(stack.client, index) for index in range(32)))
        assert [r.usage.output_tokens for r in results] == [3 + i % 40 for i in range(32)]
        assert set(stack.held().values()) == {0}


async def test_random_endings_leave_nothing(golden_model, script_file):
    script = script_file(mean_output_tokens=0, step_seconds=0.001, token_ids=LETTERS)
    rng = random.Random(7)
    pool = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    async with running_stack(
        golden_model, num_workers=2, script=script, router={"max_queued_requests": 150}, **pool
    ) as stack:
        outcomes = await asyncio.gather(
            *(_random_ending(stack, index, rng.random()) for index in range(200))
        )
        await until(lambda: set(stack.held().values()) == {0})
        assert outcomes.count("served") > 40
        assert outcomes.count("CANCELLED") > 20
        assert outcomes.count("DEADLINE_EXCEEDED") > 5
        assert (await ask(stack.client, 1)).usage.output_tokens == 4


async def _random_ending(stack, index, chance):
    """Served, closed early, cancelled by id, or out of time; the outcome's name."""
    timeout = 0.05 if chance > 0.85 else 60.0
    try:
        async with stack.client.stream_chat(
            question(index), max_tokens=10 + index % 30, seed=index, timeout=timeout
        ) as stream:
            seen = 0
            async for _ in stream.events():
                seen += 1
                if chance < 0.15 and seen > index % 6:
                    return "closed"
                if chance < 0.35 and seen > index % 4:
                    await stack.client.cancel(stream.request_id)
            return "served"
    except NoriaError as error:
        return error.reason.value
