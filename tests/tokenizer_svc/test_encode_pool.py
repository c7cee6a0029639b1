"""Long texts never stand in the way of short ones."""

import asyncio
import threading

import pytest

from noria.reasons import Reason, RequestError
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


async def test_long_texts_beyond_the_bound_are_refused_until_others_are_done():
    """Whatever clients send at the same time, what waits here is bounded; one always may."""
    gate, size = threading.Event(), LONG_TEXT_BYTES + 1
    with EncodePool(1, max_long_bytes=2 * size) as pool:
        waiting = [asyncio.create_task(pool.run(size, gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(
            RequestError, match=f"after {2 * size} bytes .* at most {2 * size}"
        ) as full:
            await pool.run(size, gate.wait)
        assert (full.value.reason, full.value.retry_after_s) == (Reason.QUEUE_FULL, 2.0)
        waiting.pop().cancel()
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(pool.run(size, lambda: True)))
        gate.set()
        assert await asyncio.gather(*waiting) == [True, True]
        assert await pool.run(3 * size, lambda: "alone") == "alone"


async def test_errors_come_back_to_the_caller():
    """What the encode raises is raised where it was awaited."""

    def fail():
        raise ValueError("bad")

    with EncodePool(1) as pool, pytest.raises(ValueError, match="bad"):
        await pool.run(1, fail)
