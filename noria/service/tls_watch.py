"""Follows the TLS files of a service: takes over changed ones, tells when certificates expire."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

import structlog
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from noria.service.log import loop_end
from noria.service.metrics import gauges
from noria.service.tasks import keep_running
from noria.service.tls_files import TlsFileError, TlsMaterial, TlsSource

POLL_S = 1.0
WARN_AHEAD_S = 14 * 24 * 3600.0
_WARN_EVERY_S = 24 * 3600.0


class TlsWatch(Collector):
    """The sources by their side, "server" or "client"; those that are None are not there.

    `wall_clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        sources: Mapping[str, TlsSource | None],
        log: structlog.typing.FilteringBoundLogger,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._sources = {side: source for side, source in sources.items() if source is not None}
        self._log = log
        self._wall_clock = wall_clock
        self._known: dict[str, tuple[TlsMaterial, float | None]] = {}
        self._warned: dict[str, tuple[TlsMaterial, float]] = {}

    @contextlib.asynccontextmanager
    async def running(self, registry: CollectorRegistry) -> AsyncIterator[None]:
        """Follow the files inside the block, and expose when their certificates expire."""
        registry.register(self)
        self.warn()
        task = asyncio.create_task(keep_running(self.follow, loop_end(self._log)))
        try:
            yield
        finally:
            task.cancel()

    async def follow(self) -> None:
        """Look at the files once a second until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            for side, source in self._sources.items():
                await self._look(side, source)
            self.warn()

    async def _look(self, side: str, source: TlsSource) -> None:
        try:
            if await asyncio.to_thread(source.poll):
                self._log.info("tls_files_read", side=side)
        except TlsFileError as error:
            self._log.error("tls_files_refused", side=side, reason=str(error))

    def warn(self) -> None:
        """Log once a day what has expired or will within two weeks."""
        now = self._wall_clock()
        for side, left_s in self.seconds_left().items():
            material = self._sources[side].material
            warned, at = self._warned.get(side, (None, 0.0))
            if left_s > WARN_AHEAD_S or (warned is material and now - at < _WARN_EVERY_S):
                continue
            self._warned[side] = (material, now)
            if left_s > 0:
                self._log.warning("certificate_expires", side=side, seconds_left=round(left_s))
            else:
                self._log.error("certificate_expired", side=side, seconds_ago=round(-left_s))

    def seconds_left(self) -> dict[str, float]:
        """How long each side's certificate is still valid; below 0 once it is not."""
        now = self._wall_clock()
        expiries = {side: self._expires_at(side) for side in self._sources}
        return {side: at - now for side, at in expiries.items() if at is not None}

    def _expires_at(self, side: str) -> float | None:
        material = self._sources[side].material
        if material.cert is None:
            return None
        known, at = self._known.get(side, (None, None))
        if known is not material:
            at = self._read_expiry(side, material.cert)
            self._known[side] = (material, at)
        return at

    def _read_expiry(self, side: str, cert: bytes) -> float | None:
        try:
            return expires_at(cert)
        except ValueError:
            # OpenSSL took it, and so does whoever connects.
            self._log.warning("certificate_expiry_unknown", side=side)
            return None

    def collect(self) -> Iterable[Metric]:
        yield expiry_gauge(self.seconds_left())


def expiry_gauge(seconds_left: Mapping[str, float]) -> Metric:
    """By side: "server" or "client"."""
    return gauges(
        "noria_tls_certificate_expires_seconds",
        "For how long this side's certificate is still valid; below 0: it is not.",
        "side",
        seconds_left,
    )


def expires_at(pem: bytes) -> float:
    """When the first of these certificates expires, in seconds since the epoch."""
    # Here, since a service without TLS does not need it, and it takes its time.
    from cryptography import x509

    return min(
        certificate.not_valid_after_utc.timestamp()
        for certificate in x509.load_pem_x509_certificates(pem)
    )
