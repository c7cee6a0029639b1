"""A process must not go on without one of its threads, nor wait for one to leave."""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThreadDeath:
    """A thread that an error ended."""

    name: str
    error: BaseException


@contextlib.contextmanager
def first_death() -> Iterator["asyncio.Future[ThreadDeath]"]:
    """The first thread of the process that an error ends while inside. Use on the event loop.

    Nothing is printed of the error: it could hold what a request sent.
    """
    loop, before = asyncio.get_running_loop(), threading.excepthook
    death: asyncio.Future[ThreadDeath] = loop.create_future()

    def note(told: ThreadDeath) -> None:
        if not death.done():
            death.set_result(told)

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            name = args.thread.name if args.thread is not None else ""
            loop.call_soon_threadsafe(note, ThreadDeath(name, args.exc_value))

    threading.excepthook = hook
    try:
        yield death
    finally:
        threading.excepthook = before
        death.cancel()


def leave(status: int) -> None:
    """End the process with this status, also where a thread is inside a library.

    It cannot be interrupted there: to wait for it could take for ever, and to tear the
    interpreter down under it would abort the process.
    """
    if any(thread is not threading.main_thread() for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
