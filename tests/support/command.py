"""A `noria` command as a running process: what it writes, how it ends, its children."""

import contextlib
import os
import queue
import re
import select
import signal
import subprocess
import threading
from pathlib import Path

SECONDS = 240


class Command:
    """A running `noria` command and the lines it writes."""

    def __init__(self, process):
        self.process = process
        self.seen = []
        self._lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def until(self, pattern):
        """Read lines until one matches."""
        while (line := self._lines.get(timeout=SECONDS)) is not None:
            self.seen.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no line with {pattern!r} in {self.seen}")

    def exit_code(self):
        """Wait for the end; everything written is then in `seen`."""
        while (line := self._lines.get(timeout=SECONDS)) is not None:
            self.seen.append(line)
        return self.process.wait(SECONDS)

    def child_handles(self):
        """Handles of the children that it has at this moment: they tell when those end."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [os.pidfd_open(int(pid)) for pid in children.read_text().split()]


def ends(handle):
    """Whether the process of a handle ends."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(SECONDS * 1000))


@contextlib.contextmanager
def running(*argv, **options):
    """Run a command in a session of its own; whatever is left of it is killed on exit."""
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, **options,
    )  # fmt: skip
    try:
        yield Command(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(SECONDS)
