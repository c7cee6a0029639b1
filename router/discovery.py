"""Where workers are: told once, asked of a name server, or found by their leases."""

import asyncio
import socket
from collections.abc import Sequence
from typing import Protocol

from noria.service.leases import WORKERS
from router.store.base import LeaseStore, StoreUnavailableError

DNS_SCHEME = "dns:///"
_LEASES_S = 1.0
_NAME_S = 5.0
# A name that stands for nothing now, as that of a service without a ready pod.
_NOBODY = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class SourceError(Exception):
    """It cannot be told now where workers are; the message names no address."""


class WorkerSource(Protocol):
    """Tells addresses, host:port; to be asked every `interval_s` seconds."""

    interval_s: float

    async def find(self) -> frozenset[str]:
        """All that it knows of now. Raises SourceError."""
        ...


class ToldWorkers:
    """Those of the configuration."""

    interval_s = 3600.0

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = frozenset(addresses)

    async def find(self) -> frozenset[str]:
        return self._addresses


class NamedWorkers:
    """All addresses that a name stands for, as that of a headless service: one worker at each."""

    interval_s = _NAME_S

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    async def find(self) -> frozenset[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in _NOBODY:
                return frozenset()
            raise SourceError("the name server does not answer") from None
        except OSError:
            raise SourceError("the name cannot be looked up") from None
        return frozenset(_address(str(place[4][0]), self._port) for place in found)


class LeasedWorkers:
    """Those that hold a lease in the store."""

    interval_s = _LEASES_S

    def __init__(self, leases: LeaseStore) -> None:
        self._leases = leases

    async def find(self) -> frozenset[str]:
        try:
            return await self._leases.live(WORKERS)
        except StoreUnavailableError as error:
            raise SourceError(str(error)) from None


def worker_sources(workers: Sequence[str], leases: LeaseStore | None) -> list[WorkerSource]:
    """What finds these, each host:port or dns:///host:port, and those with leases, if any."""
    told = [each for each in workers if not each.startswith(DNS_SCHEME)]
    names = [each.removeprefix(DNS_SCHEME) for each in workers if each.startswith(DNS_SCHEME)]
    sources: list[WorkerSource] = [ToldWorkers(told)] if told else []
    sources += [NamedWorkers(*split_name(name)) for name in names]
    return [*sources, LeasedWorkers(leases)] if leases is not None else sources


def split_name(name: str) -> tuple[str, int]:
    """Host and port. Raises ValueError."""
    host, _, port = name.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"{DNS_SCHEME}HOST:PORT is needed")
    return host.strip("[]"), int(port)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
