"""Keepalive as both ends have it, with all times scaled down alike."""

import asyncio
import contextlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from noria.service.channel import CLIENT_OPTIONS, KEEPALIVE_S, KEEPALIVE_TIMEOUT_S, SERVER_OPTIONS

# Ten times at most: the core sends pings no faster than once a second.
SCALE = 10
PING_S = KEEPALIVE_S / SCALE


def scaled(options):
    """The same options with every time that much shorter."""
    return tuple(
        (name, value // SCALE if name.endswith("_ms") else value) for name, value in options
    )


class Quiet(health_pb2_grpc.HealthServicer):
    """Says nothing until `speak`."""

    def __init__(self):
        self.speak = asyncio.Event()

    async def Watch(self, request, context):  # noqa: N802 - the wire's name
        await self.speak.wait()
        yield health_pb2.HealthCheckResponse()


@contextlib.asynccontextmanager
async def quiet_server(options):
    server, quiet = grpc.aio.server(options=options), Quiet()
    health_pb2_grpc.add_HealthServicer_to_server(quiet, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port, quiet
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def watching(port):
    options = (*scaled(CLIENT_OPTIONS), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())


async def test_a_long_silence_is_not_punished():
    """GRP-03: as in a queue or a long prefill: a server without these options ends such a
    stream.
    """
    async with (
        quiet_server(scaled(SERVER_OPTIONS)) as (port, quiet),
        quiet_server(()) as (strict_port, _),
        watching(port) as call,
        watching(strict_port) as punished,
    ):
        reading = asyncio.create_task(call.read())
        async with asyncio.timeout(30 * PING_S):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await punished.read()
        assert caught.value.details().lower().replace("_", " ") == "too many pings"
        assert not reading.done()
        quiet.speak.set()
        assert (await reading).status == health_pb2.HealthCheckResponse.UNKNOWN


async def test_a_peer_that_falls_silent_is_noticed_within_interval_and_timeout():
    """GRP-01, GRP-03: its host is gone without a word: nothing more passes, and no connection is
    closed.
    """
    async with (
        quiet_server(scaled(SERVER_OPTIONS)) as (port, _),
        silent_relay(port) as (relay, silence),
        watching(relay) as call,
    ):
        reading = asyncio.create_task(call.read())
        done, _ = await asyncio.wait({reading}, timeout=2 * PING_S)
        assert not done
        silence.set()
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(reading, 10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        # Twice that would be a timeout that does not hold.
        assert loop.time() - began < 2 * (KEEPALIVE_S + KEEPALIVE_TIMEOUT_S) / SCALE


@contextlib.asynccontextmanager
async def silent_relay(port):
    """Passes bytes on to `port`, until the event is set: then it swallows all."""
    silence, tasks = asyncio.Event(), []

    async def pump(reader, writer):
        while data := await reader.read(65536):
            if not silence.is_set():
                writer.write(data)

    async def connected(reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        ways = ((reader, far_writer), (far_reader, writer))
        tasks.extend(asyncio.create_task(pump(*way)) for way in ways)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], silence
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
