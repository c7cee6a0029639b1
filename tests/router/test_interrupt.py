"""An interrupt ends the block with its error, and leaves the task as it was."""

import asyncio

import pytest

from noria.reasons import Reason, RequestError
from router.interrupt import Interrupt

FIRST = RequestError(Reason.CANCELLED, "first")
SECOND = RequestError(Reason.SLOW_READER, "second")


async def set_and(interrupt: Interrupt, work) -> None:
    interrupt.set(FIRST)
    await work


async def test_it_ends_whatever_the_task_waits_for():
    interrupt = Interrupt()
    asyncio.get_running_loop().call_soon(interrupt.set, FIRST)
    asyncio.get_running_loop().call_soon(interrupt.set, SECOND)
    with pytest.raises(RequestError) as caught, interrupt:
        await asyncio.Event().wait()
    assert caught.value is FIRST
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)


async def test_set_by_the_task_itself_it_takes_effect_at_the_next_wait():
    with pytest.raises(RequestError), Interrupt() as interrupt:
        await set_and(interrupt, asyncio.Event().wait())
    assert asyncio.current_task().cancelling() == 0


async def test_set_by_the_task_itself_it_takes_effect_without_a_wait_too():
    with pytest.raises(RequestError), Interrupt() as interrupt:
        interrupt.set(FIRST)
    await asyncio.sleep(0)


async def test_after_the_block_it_does_nothing():
    with Interrupt() as interrupt:
        pass
    interrupt.set(FIRST)
    await asyncio.sleep(0)


async def test_a_cancellation_from_elsewhere_stays_a_cancellation():
    async def work() -> None:
        with interrupt:
            await asyncio.Event().wait()

    for also_interrupted in (False, True):
        interrupt = Interrupt()
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        if also_interrupted:
            interrupt.set(FIRST)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_error_of_the_block_itself_goes_first():
    async def fail_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError

    with pytest.raises(KeyError), Interrupt() as interrupt:
        await set_and(interrupt, fail_when_cancelled())
    assert asyncio.current_task().cancelling() == 0
