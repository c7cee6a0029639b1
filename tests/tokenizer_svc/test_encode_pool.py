"""Long texts never stand in the way of short ones."""

import asyncio
import threading

import pytest

from tokenizer_svc.encode_pool import LONG_TEXT_BYTES, EncodePool


async def test_short_texts_pass_while_long_ones_are_encoded():
    """Long texts wait for each other, on a thread of their own."""
    gate = threading.Event()
    with EncodePool(1) as pool:
        long = [asyncio.create_task(pool.run(LONG_TEXT_BYTES + 1, gate.wait)) for _ in range(3)]
        assert await pool.run(LONG_TEXT_BYTES, lambda: "short") == "short"
        assert not any(task.done() for task in long)
        gate.set()
        assert await asyncio.gather(*long) == [True] * 3


async def test_a_cancelled_call_that_waits_is_never_run():
    """A caller who has gone costs nothing more."""
    gate, ran = threading.Event(), []
    with EncodePool(1) as pool:
        first = asyncio.create_task(pool.run(1, gate.wait))
        second = asyncio.create_task(pool.run(1, lambda: ran.append(2)))
        await asyncio.sleep(0)
        second.cancel()
        gate.set()
        await first
        await pool.run(1, lambda: ran.append(3))
    assert ran == [3]


async def test_errors_come_back_to_the_caller():
    """What the encode raises is raised where it was awaited."""

    def fail():
        raise ValueError("bad")

    with EncodePool(1) as pool, pytest.raises(ValueError, match="bad"):
        await pool.run(1, fail)
