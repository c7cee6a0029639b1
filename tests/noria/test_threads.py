"""A process does not go on without a thread that an error ended, nor wait for one that hangs."""

import subprocess
import sys
import threading

from noria.service.threads import first_death


async def test_the_first_death_of_any_thread_is_told_and_nothing_of_its_text(capfd):
    hook = threading.excepthook

    def fail(text):
        raise ValueError(text)

    with first_death() as death:
        for number in range(2):
            thread = threading.Thread(target=fail, args=("Xanadu",), name=f"thread {number}")
            thread.start()
            thread.join()
        told = await death
        assert (told.name, type(told.error)) == ("thread 0", ValueError)
    assert threading.excepthook is hook
    assert "Xanadu" not in "".join(capfd.readouterr())


async def test_threads_that_end_by_themselves_are_no_deaths():
    with first_death() as death:
        thread = threading.Thread(target=lambda: sys.exit(3))
        thread.start()
        thread.join()
        assert not death.done()
    assert death.cancelled()


def test_leaving_waits_for_no_thread():
    code = (
        "import threading, time; from noria.service.threads import leave\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "leave(3)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 3
