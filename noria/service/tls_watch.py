"""Follows the TLS files of a service: takes over changed ones, tells when certificates expire."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from noria.service.log import loop_end
from noria.service.metrics import gauges
from noria.service.tasks import keep_running
from noria.service.tls_files import TlsFileError, TlsMaterial, TlsSource

POLL_S = 1.0
WARN_AHEAD_S = 14 * 24 * 3600.0
# Of a certificate that does not live that long, the last part of its life.
_WARN_PART = 1 / 3
_WARN_EVERY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Validity:
    """From when until when a certificate is valid, in seconds since the epoch."""

    begins_at: float
    ends_at: float

    @property
    def warn_ahead_s(self) -> float:
        """How long before its end that is to be told."""
        return min(WARN_AHEAD_S, (self.ends_at - self.begins_at) * _WARN_PART)


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
        self._known: dict[str, tuple[TlsMaterial, Validity | None]] = {}
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
        """Log once a day what has expired or soon will."""
        now = self._wall_clock()
        for side, validity in self._validities().items():
            material, left_s = self._sources[side].material, validity.ends_at - now
            warned, at = self._warned.get(side, (None, 0.0))
            was_told = warned is material and now - at < _WARN_EVERY_S
            if left_s > validity.warn_ahead_s or was_told:
                continue
            self._warned[side] = (material, now)
            if left_s > 0:
                self._log.warning("certificate_expires", side=side, seconds_left=round(left_s))
            else:
                self._log.error("certificate_expired", side=side, seconds_ago=round(-left_s))

    def seconds_left(self) -> dict[str, float]:
        """How long each side's certificate is still valid; below 0 once it is not."""
        now = self._wall_clock()
        return {side: validity.ends_at - now for side, validity in self._validities().items()}

    def _validities(self) -> dict[str, Validity]:
        found = {side: self._validity(side) for side in self._sources}
        return {side: validity for side, validity in found.items() if validity is not None}

    def _validity(self, side: str) -> Validity | None:
        material = self._sources[side].material
        if material.cert is None:
            return None
        known, validity = self._known.get(side, (None, None))
        if known is not material:
            validity = self._read_validity(side, material.cert)
            self._known[side] = (material, validity)
        return validity

    def _read_validity(self, side: str, cert: bytes) -> Validity | None:
        try:
            return validity_of(cert)
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


def validity_of(pem: bytes) -> Validity:
    """That of the certificate, of those in the file, that ends first. Raises ValueError."""
    # Here, since a service without TLS does not need it, and it takes its time.
    from cryptography import x509

    first = min(x509.load_pem_x509_certificates(pem), key=lambda each: each.not_valid_after_utc)
    begins, ends = first.not_valid_before_utc, first.not_valid_after_utc
    return Validity(begins.timestamp(), ends.timestamp())
