"""What an operator sees of a router. Counts and latencies come from the requests' own records.

Demand and capacity have the same units, per model: sequences, and KV tokens at a request's
full length. `noria_held` is the ledger of all that is held for requests; at rest it is 0.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import CollectorRegistry

from noria.reasons import Reason
from noria.service.metrics import (
    SECONDS_BUCKETS,
    STEP_BUCKETS,
    LiveCollector,
    counter,
    gauge,
    gauges,
)
from noria.v1 import admin_pb2
from router.limit_sharing import SharingFigures
from router.record import RequestRecord
from router.timeline import Phase

SERVED = "SERVED"
# A model that no worker has named, or one too many of them.
OTHER = "other"
_MAX_MODELS = 32
# Methods whose calls have a record, and those among them that generate.
_GENERATING = ("StreamChat", "Chat", "StreamCompletion", "Completion")
_METHODS = (*_GENERATING, "CountTokens", "EstimateChat")
_LOOKUPS = (
    *("GetRequest", "CancelRequest", "ListModels", "GetUsage"),
    *admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods_by_name,
)
_RATIO_BUCKETS = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1)
_KEY_REASONS = (Reason.INVALID_KEY, Reason.METHOD_FORBIDDEN, Reason.STORE_UNAVAILABLE)


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences and tokens: wanted by requests, or offered by workers."""

    sequences: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouterState:
    """What a router holds now; by model: what waits or runs, and what connected workers offer."""

    held: Mapping[str, int] = field(default_factory=dict)
    store_up: bool = True
    ledger_waiting: int = 0
    ledger_dropped: int = 0
    sharing: SharingFigures = field(default_factory=SharingFigures)
    queue: Load = Load()
    queue_bounds: Load = Load()
    workers: Mapping[str, int] = field(default_factory=dict)
    demand: Mapping[str, Load] = field(default_factory=dict)
    capacity: Mapping[str, Load] = field(default_factory=dict)


class RouterMetrics:
    """Observes every record at its end; reads the rest from `state` when it is asked.

    Make it on the event loop, and call it there.
    """

    def __init__(self, registry: CollectorRegistry, state: Callable[[], RouterState]) -> None:
        self._state = state
        self._models: set[str] = set()
        self._requests = _by_outcome(
            registry,
            "noria_requests",
            "Requests that ended, by outcome: SERVED, or the reason why not.",
            product(_METHODS, (SERVED, *map(str, Reason))),
        )
        self._refused = _by_outcome(
            registry,
            "noria_lookups_refused",
            "Lookups whose key was refused, by reason.",
            product(_LOOKUPS, map(str, _KEY_REASONS)),
        )
        self._queue_s = _seconds(
            registry, "noria_queue_time_seconds", "Time in the queue, of all that came so far."
        )
        self._first_s = _seconds(
            registry, "noria_time_to_first_token_seconds", "From arrival to the first text."
        )
        self._total_s = _seconds(
            registry, "noria_end_to_end_latency_seconds", "From arrival to the end, if served."
        )
        self._token_s = Histogram(
            "noria_inter_token_latency_seconds",
            "Decode time by token after the first: the mean of each answer.",
            ["model"],
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self._tokens = {
            kind: Counter(f"noria_{kind}_tokens", text, ["model"], registry=registry)
            for kind, text in _TOKENS.items()
        }
        self._tokens_left = Histogram(
            "noria_limit_tokens_left_ratio",
            "What an admission left of its tenant's tokens per minute, where these are limited.",
            buckets=_RATIO_BUCKETS,
            registry=registry,
        )
        self._spans = Counter(
            "noria_trace_spans",
            "Spans of requests' traces: exported, failed, or dropped since too many waited.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("exported", "failed", "dropped"):
            self._spans.labels(outcome)
        registry.register(LiveCollector(self._live))

    def on_end(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        outcome = SERVED if record.reason is None else record.reason.value
        method = record.method if record.method in _METHODS else OTHER
        self._requests.labels(method, outcome).inc()
        if method in _GENERATING and record.model:
            self._observe(record, self._label(record.model))

    def on_late(self, record: RequestRecord, num_tokens: int) -> None:
        """Count tokens that were computed for a request after its end."""
        if record.model:
            self._tokens["wasted"].labels(self._label(record.model)).inc(num_tokens)

    def on_tokens_left(self, ratio: float) -> None:
        """Count what an admission left of its tenant's tokens per minute."""
        self._tokens_left.observe(ratio)

    def on_refused(self, method: str, reason: Reason) -> None:
        """Count a lookup whose key may not make it."""
        self._refused.labels(method, str(reason)).inc()

    def on_spans(self, outcome: str, count: int) -> None:
        """Count spans by what became of them; on any thread."""
        self._spans.labels(outcome).inc(count)

    def _observe(self, record: RequestRecord, model: str) -> None:
        total_us, phases = record.timeline.read()
        spent_us = dict(phases)
        if record.queue_position is not None:
            self._queue_s.labels(model).observe(spent_us.get(Phase.QUEUE, 0) / 1e6)
        if record.first_delta_us is not None:
            self._first_s.labels(model).observe(record.first_delta_us / 1e6)
        if record.reason is None:
            self._total_s.labels(model).observe(total_us / 1e6)
        if record.output_tokens > 1:
            decode_s = spent_us.get(Phase.DECODE, 0) / 1e6
            self._token_s.labels(model).observe(decode_s / (record.output_tokens - 1))
        self._tokens["prompt"].labels(model).inc(record.input_tokens)
        self._tokens["cached_prompt"].labels(model).inc(record.cached_tokens)
        self._tokens["output"].labels(model).inc(record.output_tokens)
        self._tokens["wasted"].labels(model).inc(record.wasted_tokens)

    def _label(self, model: str) -> str:
        """The model's own name while these are few; its series exist from now on."""
        if model not in self._models:
            if len(self._models) >= _MAX_MODELS:
                return OTHER
            self._models.add(model)
            for family in (self._queue_s, self._first_s, self._total_s, self._token_s):
                family.labels(model)
            for tokens in self._tokens.values():
                tokens.labels(model)
        return model

    def _live(self) -> Iterable[Metric]:
        state = self._state()
        demand, capacity = self._folded(state.demand), self._folded(state.capacity)
        yield gauges("noria_held", "Things held for requests; 0 at rest.", "kind", state.held)
        yield gauge(
            "noria_store_up",
            "1 while Redis answers, or where there is none; else 0.",
            state.store_up,
        )
        yield gauge(
            "noria_ledger_waiting_rows",
            "Rows of the usage ledger that are not in the store yet.",
            state.ledger_waiting,
        )
        yield counter(
            "noria_ledger_dropped_rows",
            "Closed rows for which there was no room while the store was away.",
            state.ledger_dropped,
        )
        yield counter(
            "noria_limit_exchanges", "Exchanges about limits with Redis.", state.sharing.exchanges
        )
        yield counter("noria_limit_exchanges_failed", "Those that failed.", state.sharing.failed)
        yield gauge(
            "noria_limit_untold_tenants",
            "Tenants of whom something is to be told to Redis.",
            state.sharing.untold,
        )
        yield counter(
            "noria_limit_untold_dropped",
            "How often a tenant's charges were never told, because too many waited.",
            state.sharing.dropped,
        )
        yield gauge("noria_queue_requests", "Requests in the queue.", state.queue.sequences)
        yield gauge(
            "noria_queue_max_requests", "Requests it may hold.", state.queue_bounds.sequences
        )
        yield gauge("noria_queue_tokens", "Prompt tokens in the queue.", state.queue.tokens)
        yield gauge(
            "noria_queue_max_tokens", "Prompt tokens it may hold.", state.queue_bounds.tokens
        )
        yield gauges(
            "noria_workers", "Workers that were told or found, by state.", "state", state.workers
        )
        for side, loads in (("demand", demand), ("capacity", capacity)):
            sequences = {model: load.sequences for model, load in loads.items()}
            tokens = {model: load.tokens for model, load in loads.items()}
            yield gauges(f"noria_sequences_{side}", _SEQUENCES[side], "model", sequences)
            yield gauges(f"noria_kv_tokens_{side}", _KV_TOKENS[side], "model", tokens)

    def _folded(self, loads: Mapping[str, Load]) -> dict[str, Load]:
        """By the models' labels; one that has nothing now keeps its series."""
        folded = dict.fromkeys(self._models, Load())
        for model, load in loads.items():
            label = self._label(model)
            before = folded.get(label, Load())
            folded[label] = Load(before.sequences + load.sequences, before.tokens + load.tokens)
        return folded


_TOKENS = {
    "prompt": "Prompt tokens of requests that ended.",
    "cached_prompt": "Those of them that came from the prefix cache.",
    "output": "Tokens whose text was on its way to clients.",
    "wasted": "Tokens computed that nobody was sent.",
}
_SEQUENCES = {
    "demand": "Requests that wait for a worker or are on one.",
    "capacity": "Places in the batches of connected workers that do not drain.",
}
_KV_TOKENS = {
    "demand": "KV tokens of these requests at their full length.",
    "capacity": "KV tokens that connected workers that do not drain have room for.",
}


def _by_outcome(
    registry: CollectorRegistry, name: str, text: str, known: Iterable[tuple[str, str]]
) -> Counter:
    """A counter by method and outcome; the known ones are there from the beginning, at 0."""
    counted = Counter(name, text, ["method", "outcome"], registry=registry)
    for method, outcome in known:
        counted.labels(method, outcome)
    return counted


def _seconds(registry: CollectorRegistry, name: str, text: str) -> Histogram:
    return Histogram(name, text, ["model"], buckets=SECONDS_BUCKETS, registry=registry)
