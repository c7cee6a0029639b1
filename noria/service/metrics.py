"""Metrics of one service: a registry, an HTTP port of its own, the event loop's lag.

Gauges are computed when they are read, from the objects that they tell of: they can
neither leak nor disagree with these. No label takes a value that a request brought.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import prometheus_client
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry

SECONDS_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
)  # fmt: skip
STEP_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 5,
)  # fmt: skip
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_LAG_INTERVAL_S = 0.25
# A loop that does not answer a scrape for so long is told of by its age alone.
_ANSWER_S = 2.0


def new_registry() -> CollectorRegistry:
    """A registry with the process's own figures (CPU, memory, files)."""
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    return registry


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """One gauge for each value of a label."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for label_value, value in values.items():
        family.add_metric([label_value], value)
    return family


def counter(name: str, text: str, value: float) -> Metric:
    """A count that is kept elsewhere; exposed as NAME_total."""
    return CounterMetricFamily(name, text, value=value)


def counters(
    name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]
) -> Metric:
    """Counts that are kept elsewhere, one for each tuple of label values."""
    family = CounterMetricFamily(name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def info(name: str, text: str, values: Mapping[str, str]) -> Metric:
    """Constant labels; exposed as NAME_info with the value 1."""
    return InfoMetricFamily(name, text, value=dict(values))


class LiveCollector(Collector):
    """Collects on the event loop what belongs to it, whichever thread asks.

    Make it on the loop. A loop that does not answer gives no figures rather than old ones.
    """

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            return self._read_from_elsewhere()
        return list(self._read()) if here is self._loop else self._read_from_elsewhere()

    def _read_from_elsewhere(self) -> list[Metric]:
        async def read() -> list[Metric]:
            return list(self._read())

        reading = asyncio.run_coroutine_threadsafe(read(), self._loop)
        try:
            return reading.result(_ANSWER_S)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            reading.cancel()
            return []


class LoopLag(Collector):
    """How late the event loop runs what is due: the time in which nobody is served.

    Besides the histogram of sampled lags a gauge tells how long ago the loop ran last: read
    from another thread it shows a loop that stands still.
    """

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._due = clock()
        self._lag = prometheus_client.Histogram(
            "noria_event_loop_lag_seconds",
            "How late the event loop ran a timer, sampled four times a second.",
            buckets=_LAG_BUCKETS,
            registry=registry,
        )
        registry.register(self)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self._due = self._clock() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self.sample()

    def sample(self) -> None:
        """Note how late it is now."""
        self._lag.observe(max(0.0, self._clock() - self._due))

    def collect(self) -> Iterator[Metric]:
        yield gauge(
            "noria_event_loop_overdue_seconds",
            "For how long the event loop has owed a timer; 0 while it keeps up.",
            max(0.0, self._clock() - self._due),
        )


@contextlib.asynccontextmanager
async def serving_metrics(listen: str, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Sample the loop's lag and serve /metrics on `listen` (host:port) inside the block.

    Gives the address with the port really taken; an empty `listen` serves nothing and gives
    "". Raises OSError, naming the address, if it cannot be bound.
    """
    sampling = asyncio.create_task(LoopLag(registry).run())
    try:
        async with _http(listen, registry) as address:
            yield address
    finally:
        sampling.cancel()


@contextlib.asynccontextmanager
async def _http(listen: str, registry: CollectorRegistry) -> AsyncIterator[str]:
    if not listen:
        yield ""
        return
    host, _, port = listen.rpartition(":")
    try:
        # On a thread: it may ask for host names.
        server, thread = await asyncio.to_thread(
            prometheus_client.start_http_server, int(port), host.strip("[]"), registry
        )
    except (OSError, ValueError, OverflowError) as error:
        raise OSError(f"cannot serve metrics on {listen}: {error}") from error
    try:
        yield f"{host}:{server.server_port}"
    finally:
        # A scrape under way may need this loop to end.
        await asyncio.to_thread(_stop, server, thread)


def _stop(server: Any, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join()
