"""A child process dies with the process that started it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to end this process with SIGTERM when its parent ends (Linux: prctl(2)).

    `parent_pid` is who it should be: a parent that died before the call is noticed too.
    Elsewhere than on Linux nothing is asked.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        raise SystemExit("the parent process is gone")
