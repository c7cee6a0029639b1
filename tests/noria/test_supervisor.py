"""Children are started, heard, and ended on every way out."""

import asyncio
import os
import signal
import sys

import pytest

from noria.cli.supervisor import ChildDiedError, ChildSpec, StopRule, running_child, unless_died
from tests.noria.stub_service import stub_argv


def stub(behaviour, name="worker"):
    return ChildSpec(name, stub_argv("worker", behaviour))


def script(code):
    return ChildSpec("script", (sys.executable, "-c", code))


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ignore(_child, _event):
    pass


async def for_ever():
    await asyncio.Event().wait()


async def test_events_are_heard_in_order_and_the_address_is_read():
    heard = []
    async with running_child(stub("ready"), lambda *e: heard.append(e), StopRule()) as child:
        assert (await child.event("listening"))["address"] == "127.0.0.1:1"
        await child.event("ready")
    names = [event["event"] for _, event in heard]
    assert names == ["pid", "listening", "progress", "ready", "stopped"]
    assert {name for name, _ in heard} == {"worker"}


async def test_leaving_the_block_ends_the_child():
    async with running_child(stub("ready"), ignore, StopRule()) as child:
        await child.event("ready")
    assert child.process.returncode == 0
    assert is_gone(child.process.pid)


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace():
    async with running_child(stub("stubborn"), ignore, StopRule(grace_s=0.1)) as child:
        await child.event("ready")
    assert child.process.returncode == -signal.SIGKILL


async def test_hurrying_kills_at_once():
    rule = StopRule(grace_s=600)
    async with running_child(stub("stubborn"), ignore, rule) as child:
        await child.event("ready")
        rule.hurry.set()
    assert child.process.returncode == -signal.SIGKILL


async def test_cancelling_the_stop_kills_at_once():
    started = asyncio.Event()

    async def supervise():
        async with running_child(stub("stubborn"), ignore, StopRule(grace_s=600)) as child:
            await child.event("ready")
            pids.append(child.process.pid)
            started.set()
            await for_ever()

    pids = []
    task = asyncio.create_task(supervise())
    await started.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 20)
    assert is_gone(pids[0])


async def test_a_child_that_dies_ends_the_work_and_its_last_lines_are_told():
    async with running_child(stub("dies"), ignore, StopRule()) as child:
        with pytest.raises(ChildDiedError, match="worker ended by itself") as died:
            await unless_died([child], child.event("listening"))
    assert died.value.lines[-1] == "no such weights"


async def test_a_child_killed_by_a_signal_is_said_to_be():
    async with running_child(stub("ready"), ignore, StopRule()) as child:
        await child.event("ready")
        child.process.kill()
        with pytest.raises(ChildDiedError, match="signal 9"):
            await unless_died([child], for_ever())


async def test_only_the_last_lines_are_kept_and_over_long_ones_do_not_stop_the_reader():
    code = "print('x' * 3_000_000)\nfor i in range(1000): print(i)"
    async with running_child(script(code), ignore, StopRule()) as child:
        with pytest.raises(ChildDiedError) as died:
            await unless_died([child], for_ever())
    assert died.value.lines[-1] == "999"
    assert len(died.value.lines) == 20


async def test_output_is_read_to_its_end_whatever_hearing_it_raises():
    """A child must not stand still because nobody reads it; the defect is told afterwards."""
    code = "for i in range(20_000): print(i, 'x' * 50)"

    def fail(_child, event):
        raise LookupError(event["event"].split()[0])

    async def hear():
        async with running_child(script(code), fail, StopRule()) as child:
            with pytest.raises(ChildDiedError, match="exit status 0") as died:
                await unless_died([child], for_ever())
            last.append(died.value.lines[-1])

    last = []
    with pytest.raises(LookupError, match=r"^0$"):
        await hear()
    assert last[0].startswith("19999 ")


async def test_output_that_can_no_longer_be_read_ends_the_work(monkeypatch):
    """The child would stand still at its next line."""
    async with running_child(stub("ready"), ignore, StopRule()) as child:
        await child.event("ready")
        child.reading.cancel()
        await asyncio.wait({child.reading})
        child.reading = asyncio.get_running_loop().create_future()
        child.reading.set_exception(OSError("the pipe is broken"))
        with pytest.raises(OSError, match="the pipe is broken"):
            await unless_died([child], for_ever())


async def test_text_that_is_no_event_is_heard_as_text():
    heard = []
    code = "print('plain'); print('[1]'); print('\\udcff'.encode('utf-8', 'surrogateescape'))"
    async with running_child(
        script(code), lambda _, e: heard.append(e["event"]), StopRule()
    ) as child:
        with pytest.raises(ChildDiedError):
            await unless_died([child], for_ever())
    assert heard[:2] == ["plain", "[1]"]


async def test_work_that_fails_is_reported_as_it_is():
    async def fail():
        raise LookupError("mine")

    async with running_child(stub("ready"), ignore, StopRule()) as child:
        with pytest.raises(LookupError, match="mine"):
            await unless_died([child], fail())


async def test_a_child_is_in_a_session_of_its_own():
    async with running_child(stub("ready"), ignore, StopRule()) as child:
        await child.event("ready")
        assert os.getsid(child.process.pid) == child.process.pid != os.getsid(0)


async def test_a_program_that_does_not_exist_is_an_error_at_once():
    with pytest.raises(FileNotFoundError):
        async with running_child(ChildSpec("none", ("/no/such/program",)), ignore, StopRule()):
            pytest.fail("it cannot have started")
