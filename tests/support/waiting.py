"""Wait for something that has no event of its own."""

import asyncio


async def until(condition, timeout=20.0):
    """Return once the condition holds; the failure names it."""
    for _ in range(int(timeout / 0.002)):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"still not true after {timeout} s: {condition}")
