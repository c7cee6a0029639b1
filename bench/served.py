"""A copy of Noria that serves on this computer for as long as it is measured."""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STOP_S = 30.0


class NotServedError(Exception):
    """The services ended before they were ready; the text is the last they wrote."""


@dataclass(frozen=True, slots=True)
class Served:
    """A router that is ready: host:port, and a key that it takes."""

    address: str
    api_key: str


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Served]:
    """`noria up` with these flags, run from the sources in `folder`, on a free port.

    Raises NotServedError. Its keys are its own; the user's are not touched.
    """
    key = f"noria-{secrets.token_hex(24)}"
    with tempfile.TemporaryDirectory() as config:
        environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "NORIA_CONFIG_DIR": config,
            "NORIA_API_KEY": key,
        }
        argv = [sys.executable, "-P", "-m", "noria.cli", "up"]
        with subprocess.Popen(
            [*argv, "--port", "0", "--metrics-port", "0", *flags],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                yield Served(_address(process), key)
            finally:
                _stop(process)


def _address(process: subprocess.Popen[str]) -> str:
    last: deque[str] = deque(maxlen=10)
    for line in process.stdout or ():
        last.append(line)
        if line.startswith("serving: "):
            return line.split()[-1]
    raise NotServedError("".join(last))


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
