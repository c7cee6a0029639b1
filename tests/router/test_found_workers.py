"""Workers that are found: by leases, by a name. Coming and going disturbs no stream."""

import asyncio
import contextlib
import socket

import pytest
import structlog

from router import discovery, worker_sessions
from router.config import RouterConfig
from router.discovery import NamedWorkers, SourceError, worker_sources
from router.store.memory_leases import MemoryLeases
from tests.router.fakes import EOS, FakeWorker, events, next_event, routed, until
from worker import lease as worker_lease_module
from worker.config import WorkerConfig
from worker.lease import worker_lease


class SecondWorker(FakeWorker):
    """At the same port of another address."""

    host = "127.0.0.2"


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """All that is done from time to time is done all the time."""
    monkeypatch.setattr(discovery.LeasedWorkers, "interval_s", 0.02)
    monkeypatch.setattr(discovery.NamedWorkers, "interval_s", 0.02)
    monkeypatch.setattr(worker_sessions, "_LEAVE_S", 0.02)
    monkeypatch.setattr(worker_lease_module, "RENEW_S", 0.05)
    monkeypatch.setattr(worker_lease_module, "_RETRY_S", 0.05)


@contextlib.asynccontextmanager
async def routed_by_leases(url, *workers):
    """A router that is told of no worker."""
    settings = {"workers": (), "redis_url": url, "redis_timeout_s": 5.0}
    async with routed(*workers, ready=False, **settings) as setup:
        yield setup


@contextlib.asynccontextmanager
async def leased(setup, url, number):
    """One of the workers is found, and connected."""
    address = setup.workers[number].address
    async with worker_lease(url, address, structlog.get_logger()) as lease:
        lease.begin()
        await loaded(setup, address)
        yield lease


async def loaded(setup, *addresses):
    """Wait until these workers, and no others, may be given work."""
    await until(
        lambda: {w.worker_id for w in setup.router.registry if w.load is not None} == set(addresses)
    )
    await asyncio.wait_for(setup.router.wait_ready(), 5)


async def begun(setup, number=0):
    """A stream on that worker, with its first token."""
    call = setup.stream()
    worker = setup.workers[number]
    await until(lambda: worker.live)
    (submit,) = worker.live
    worker.emit(submit, 10)
    while not (await next_event(call)).HasField("content_block_delta"):
        pass
    return call, submit


async def finished(setup, call, submit, number=0):
    setup.workers[number].emit(submit, 11)
    setup.workers[number].finish(submit, "eos", EOS)
    assert (await events(call))[-1].HasField("message_stop")


async def test_a_worker_that_comes_gets_work_and_one_that_leaves_keeps_its_streams(redis_url):
    first, second = FakeWorker(), FakeWorker()
    async with (
        routed_by_leases(redis_url, first, second) as setup,
        leased(setup, redis_url, 0) as lease,
    ):
        call, submit = await begun(setup)
        async with worker_lease(redis_url, second.address, structlog.get_logger()) as other:
            other.begin()
            await loaded(setup, first.address, second.address)
            # As `drain` does: found no more, then no more work.
            await lease.leave()
            first.draining = True
            first.say_load()
            second.auto = [10]
            await events(setup.stream())
            await events(setup.stream())
            assert len(second.submits) == 2
            await finished(setup, call, submit)
            first.break_session()
            await until(lambda: setup.router.state().workers["known"] == 1)
            await events(setup.stream())


async def test_a_lease_that_runs_out_ends_no_stream_and_no_use_of_a_connected_worker(
    redis_url, shared_redis_server
):
    """RDS-05: its session is the better witness."""
    async with routed_by_leases(redis_url, FakeWorker()) as setup:
        async with leased(setup, redis_url, 0):
            call, submit = await begun(setup)
        with shared_redis_server.client() as client:
            client.flushall()
        await asyncio.sleep(0.2)
        await finished(setup, call, submit)
        setup.worker.auto = [10]
        await events(setup.stream())


@pytest.mark.parametrize("keeps_data", [True, False], ids=["with data", "empty"])
async def test_after_an_outage_of_the_store_workers_are_found_again(redis_server, keeps_data):
    """RDS-05: the known ones serve meanwhile; a new one and one that came back are found."""
    first, second = FakeWorker(), FakeWorker()
    async with (
        routed_by_leases(redis_server.url, first, second) as setup,
        leased(setup, redis_server.url, 0),
        worker_lease(redis_server.url, second.address, structlog.get_logger()) as other,
    ):
        call, submit = await begun(setup)
        redis_server.kill()
        if not keeps_data:
            redis_server.forget()
        other.begin()
        first.auto = [10]
        await events(setup.stream())
        redis_server.start()
        await loaded(setup, first.address, second.address)
        await finished(setup, call, submit)
        first.break_session()
        await loaded(setup, second.address)
        await loaded(setup, first.address, second.address)


async def test_what_a_name_stands_for_is_followed(monkeypatch):
    """GRP-07: one that comes gets work; one that the name leaves keeps streams, and is left
    when it is gone; a name server that fails changes nothing.
    """
    first = FakeWorker()
    await first.start()
    second = SecondWorker()
    second.port = first.port
    await first.stop()
    answer = Answer(monkeypatch, first.port)
    answer.hosts = ["127.0.0.1"]
    name = f"dns:///workers.example:{first.port}"
    async with routed(first, second, ready=False, workers=(name,)) as setup:
        await loaded(setup, first.address)
        call, submit = await begun(setup)
        answer.hosts = ["127.0.0.1", "127.0.0.2"]
        await loaded(setup, first.address, second.address)
        answer.hosts = socket.gaierror(socket.EAI_AGAIN, "again")
        await answer.asked_again()
        answer.hosts = ["127.0.0.2"]
        await answer.asked_again()
        await finished(setup, call, submit)
        first.break_session()
        await loaded(setup, second.address)
        second.auto = [10]
        await events(setup.stream())
        answer.hosts = socket.gaierror(socket.EAI_NONAME, "none")
        await answer.asked_again()
        await events(setup.stream())


class Answer:
    """What names stand for."""

    def __init__(self, monkeypatch, port):
        self.hosts = []
        self._asked = 0
        self._port = port
        real = socket.getaddrinfo
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda host, *more, **named: (
                self._told() if host == "workers.example" else real(host, *more, **named)
            ),
        )

    def _told(self):
        self._asked += 1
        if isinstance(self.hosts, Exception):
            raise self.hosts
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (host, self._port)) for host in self.hosts]

    async def asked_again(self):
        before = self._asked
        await until(lambda: self._asked >= before + 3)


async def test_a_name_server_that_fails_is_not_a_name_without_addresses(monkeypatch):
    answer, source = Answer(monkeypatch, 7), NamedWorkers("workers.example", 7)
    answer.hosts = socket.gaierror(socket.EAI_NONAME, "none")
    assert await source.find() == frozenset()
    for number in (socket.EAI_AGAIN, socket.EAI_FAIL):
        answer.hosts = socket.gaierror(number, "workers.example is away")
        with pytest.raises(SourceError) as caught:
            await source.find()
        assert "example" not in str(caught.value)
    answer.hosts = ["::1", "127.0.0.1"]
    assert await source.find() == {"[::1]:7", "127.0.0.1:7"}


async def test_all_ways_to_find_workers_may_be_used_together():
    leases = MemoryLeases()
    await leases.renew("workers", "c:3", 60)
    sources = worker_sources(("a:1", "b:2", "dns:///localhost:4"), leases)
    assert [await source.find() for source in (sources[0], sources[2])] == [
        {"a:1", "b:2"}, {"c:3"},
    ]  # fmt: skip
    assert "127.0.0.1:4" in await sources[1].find()


@pytest.mark.parametrize("name", ["dns:///workers", "dns:///:1", "dns:///w:0", "dns:///w:x"])
def test_a_name_without_a_port_is_refused(name):
    with pytest.raises(ValueError, match="worker: dns:///HOST:PORT is needed"):
        RouterConfig(tokenizers=("t:1",), workers=(name,), api_key_sha256="a1" * 32)


def test_a_worker_that_listens_everywhere_says_where_it_is_found(tmp_path):
    for listen in ("0.0.0.0:1", "[::]:1", ":1"):
        with pytest.raises(ValueError, match="advertise is needed"):
            WorkerConfig(tmp_path, listen=listen, redis_url="redis://h")
        WorkerConfig(tmp_path, listen=listen, redis_url="redis://h", advertise="pod:1")
        WorkerConfig(tmp_path, listen=listen)
    with pytest.raises(ValueError, match="host:port is needed"):
        WorkerConfig(tmp_path, redis_url="redis://h", advertise="pod")


@pytest.mark.parametrize("url", ["http://:PASSMARK@h", "redis://h?odd=PASSMARK"])
async def test_a_lease_whose_url_cannot_be_used_is_refused_without_it(url):
    with pytest.raises(ValueError, match="redis-url") as caught:
        async with worker_lease(url, "w:1", structlog.get_logger()):
            pass
    assert "PASSMARK" not in str(caught.value)
