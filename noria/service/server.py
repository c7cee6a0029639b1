"""What every Noria server has: health, reflection, listening, a drain on SIGTERM."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from noria.service.channel import SERVER_OPTIONS, Options
from noria.service.guard import GuardedRequests
from noria.service.tls import server_credentials
from noria.service.tls_files import TlsSource

LIVE = "live"


@dataclass(frozen=True)
class RunningServer:
    """A listening server. `address` is host:port with the port really taken."""

    grpc_server: grpc.aio.Server
    address: str
    _health: health.aio.HealthServicer
    _names: tuple[str, ...]

    async def set_ready(self, ready: bool) -> None:
        """Answer SERVING (or not) for the empty name and for every service of this server."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in ("", *self._names):
            await self._health.set(name, status.SERVING if ready else status.NOT_SERVING)

    async def set_live(self, live: bool) -> None:
        """Answer for the name `live`: whether restarting the process would help."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        await self._health.set(LIVE, status.SERVING if live else status.NOT_SERVING)


@contextlib.asynccontextmanager
async def running_server(
    add_services: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
    listen: str,
    *,
    stop_grace_s: float = 1.0,
    options: Options = (),
    guard: GuardedRequests | None = None,
    tls: TlsSource | None = None,
) -> AsyncIterator[RunningServer]:
    """Listen on `listen` (host:port; port 0 picks a free one): live at once, not yet ready.

    `options` come beside SERVER_OPTIONS; `guard` says whose requests are parsed, by default
    everybody's; with `tls` nothing else is spoken. On exit calls still open get `stop_grace_s`
    to end. Raises OSError if the address cannot be bound.
    """
    server = grpc.aio.server(
        interceptors=(guard or GuardedRequests(),), options=(*SERVER_OPTIONS, *options)
    )
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    add_services(server)
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    port = _bind(server, listen, tls)
    address = f"{listen.rpartition(':')[0]}:{port}"
    running = RunningServer(server, address, checks, tuple(service_names))
    await running.set_ready(False)
    await running.set_live(True)
    await server.start()
    try:
        yield running
    finally:
        await server.stop(stop_grace_s)


def _bind(server: grpc.aio.Server, listen: str, tls: TlsSource | None) -> int:
    try:
        if tls is not None:
            return server.add_secure_port(listen, server_credentials(tls))
        return server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}; is the port taken?") from error


def stop_event() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets. Call it on the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
