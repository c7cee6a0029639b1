"""A loop of the router that is cancelled at any of its awaits is begun again; nothing is held.

Loops are cancelled when the router stops, and a defect may end one: either way what it holds
comes back, and the process goes on.
"""

import asyncio
import functools
import hashlib
import threading

import grpc
import pytest
import structlog

from noria.service.tasks import keep_running
from router import assembly, connection, worker_sessions
from router.access import Access
from router.keys_file import KeysFile
from router.loops import Loops
from router.tokenizer import Tokenizer
from router.worker_session import WorkerSession
from tests.router.fakes import KEY, events, kinds, routed, until
from tests.support.suspensions import LoopSuspensions

# What is cancelled, and at how many awaits at least.
LOOPS = {
    "worker session": (WorkerSession, "run", 6),
    "tokenizer session": (Tokenizer, "run", 6),
    "writer": (connection, "_write_all", 4),
    "health": (Loops, "report_health", 2),
    "keys": (Access, "follow_file", 4),
    "ticks": (Loops, "tick", 2),
}
# These wait for time alone: they come to each await whatever happens.
BY_TIME = {"keys", "ticks"}


@pytest.fixture
def keys_file(tmp_path, monkeypatch):
    """A keys file; loops that end are begun again at once, sessions connected again soon."""
    for module in (assembly, worker_sessions):
        monkeypatch.setattr(module, "keep_running", functools.partial(keep_running, pause_s=0.01))
    monkeypatch.setattr(connection, "_MAX_DELAY_S", 0.05)
    path = tmp_path / "keys.toml"
    write(path, KEY)
    return path


@pytest.mark.parametrize("loop", LOOPS)
async def test_nothing_is_held_and_the_next_request_is_served(loop, keys_file, monkeypatch):
    """Whatever the loop waits for: a connection, a message, room to write, a file, time."""
    owner, name, least = LOOPS[loop]
    cut = LoopSuspensions(monkeypatch, owner, name)
    cuts = 0
    settings = {"api_key_sha256": "", "keys_file": keys_file, "keys_poll_s": 0.01}
    with structlog.testing.capture_logs() as lines:
        async with routed(**settings) as setup:
            setup.worker.auto = [10, 11, 12]
            while cuts < least if loop in BY_TIME else cuts < 40:
                write(keys_file, KEY, f"another-{cuts}")
                cut.cut_at(cuts + 1)
                await busy(setup)
                if loop in BY_TIME:
                    await until(lambda: cut.hit)
                elif not cut.hit:
                    break
                cuts += 1
                await setup.at_rest()
                await served(setup, KEY)
                await taken_over(setup, f"another-{cuts - 1}")
    told = [line["event"] for line in lines]
    assert cuts >= least
    assert "defect" not in told
    if name != "_write_all":
        assert told.count("loop_ended") == cuts


async def test_keys_read_by_a_loop_that_was_cancelled_are_read_again(keys_file, monkeypatch):
    """The thread that reads goes on alone; what it has seen is not known for that."""
    reading, go_on = threading.Event(), threading.Event()
    poll = KeysFile.poll

    def slow_poll(file):
        keys = poll(file)
        if keys is not None and len(keys) == 2 and not reading.is_set():
            reading.set()
            go_on.wait(5)
        return keys

    monkeypatch.setattr(KeysFile, "poll", slow_poll)
    async with routed(api_key_sha256="", keys_file=keys_file, keys_poll_s=0.01) as setup:
        setup.worker.auto = [10]
        write(keys_file, KEY, "another")
        await until(reading.is_set)
        for task in asyncio.all_tasks():
            if task.get_coro().__qualname__ == "Access.follow_file":
                task.cancel()
        go_on.set()
        await taken_over(setup, "another")


def write(path, *keys):
    """A keys file with these keys takes the place of the one before."""
    entries = [
        f'[[tenants.keys]]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n' for key in keys
    ]
    fresh = path.with_name("fresh")
    fresh.write_text('[[tenants]]\nname = "t"\n' + "".join(entries))
    fresh.replace(path)


async def busy(setup):
    """Requests before, during and after a break of both sessions; they may fail, not hang."""
    statuses = [await ended(setup.stream()), await ended(setup.stream())]
    setup.worker.break_session()
    setup.tokenizer.break_sessions()
    statuses += [await ended(setup.stream()), await ended(setup.stream())]
    assert set(statuses) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


async def ended(call):
    """The status of a stream, whatever it is."""
    await asyncio.gather(events(call), return_exceptions=True)
    return await call.code()


async def served(setup, key):
    await setup.router.wait_ready()
    assert kinds(await events(setup.stream(key=key)))[-1] == "message_stop"


async def taken_over(setup, key):
    """Wait until a key that was written meanwhile is known."""
    for _ in range(200):
        status = await ended(setup.stream(key=key))
        if status is grpc.StatusCode.OK:
            return
        assert status is grpc.StatusCode.UNAUTHENTICATED
    raise AssertionError("the keys file is not followed any more")
