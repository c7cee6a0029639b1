"""Cancels a task at one of its suspensions: a call's, over all its coroutines, or a loop's."""

import asyncio
import functools
import types


class Suspensions:
    """Watches coroutines; cancels the first one's task when they suspend for the k-th time.

    `cut_at(k)` arms it for the next call; `hit` tells whether it came so far, `over` is set
    when the watched call has ended.
    """

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self.hit = False
        self.over = asyncio.Event()
        self._left = 0
        self._task = None

    def watch_call(self, owner, name):
        """The handler itself: its task is what is cancelled."""
        self._replace(owner, name, self._call)

    def watch_part(self, owner, name):
        """A coroutine that runs on the call's behalf, in a task of its own."""
        self._replace(owner, name, self._part)

    def cut_at(self, number):
        self.hit, self.over, self._left = False, asyncio.Event(), number

    def _replace(self, owner, name, run):
        original = getattr(owner, name)

        @functools.wraps(original)
        async def watched(*arguments, **named):
            return await run(original(*arguments, **named))

        self._monkeypatch.setattr(owner, name, watched)

    async def _call(self, coroutine):
        if self._task is not None or not self._left:
            return await coroutine
        self._task = asyncio.current_task()
        try:
            return await counted(coroutine, self._suspended)
        finally:
            self._task, self._left = None, 0
            self.over.set()

    async def _part(self, coroutine):
        return await (coroutine if self._task is None else counted(coroutine, self._suspended))

    def _suspended(self):
        if self._task is not None and self._left:
            self._left -= 1
            if not self._left:
                self.hit = True
                self._task.cancel()


class LoopSuspensions:
    """Watches a coroutine of a running service; cancels its own task at the k-th suspension.

    `hit` tells whether it came since `cut_at(k)`.
    """

    def __init__(self, monkeypatch, owner, name):
        self.hit = False
        self._left = 0
        original = getattr(owner, name)

        @functools.wraps(original)
        async def watched(*arguments, **named):
            task = asyncio.current_task()
            return await counted(original(*arguments, **named), lambda: self._suspended(task))

        monkeypatch.setattr(owner, name, watched)

    def cut_at(self, number):
        self.hit, self._left = False, number

    def off(self):
        self._left = 0

    def _suspended(self, task):
        if self._left:
            self._left -= 1
            if not self._left:
                self.hit = True
                task.cancel()


@types.coroutine
def counted(coroutine, suspended):
    """Run a coroutine as `await` would; call `suspended` at each of its suspensions."""
    step = functools.partial(coroutine.send, None)
    while True:
        try:
            waiting_for = step()
        except StopIteration as done:
            return done.value
        suspended()
        try:
            step = functools.partial(coroutine.send, (yield waiting_for))
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:
            step = functools.partial(coroutine.throw, error)


async def for_each(suspensions, ask, check):
    """Make a call for each of its suspensions, cut there, and `check` after each; how many.

    `ask()` gives a call, and a coroutine that takes in all of its answer.
    """
    for number in range(1, 1000):
        suspensions.cut_at(number)
        call, reading = ask()
        reading = asyncio.create_task(reading)
        async with asyncio.timeout(10):
            await suspensions.over.wait()
        if suspensions.hit:
            # The transport cancels a handler only when its client is gone.
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        else:
            await reading
        await check()
        if not suspensions.hit:
            return number - 1
    raise AssertionError("a call with a thousand suspensions")
