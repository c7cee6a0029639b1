"""What an operator sees of a worker. Sequences are counted against places, tokens against KV.

`noria_worker_running_sequences` + `_waiting_sequences` are the demand for
`noria_worker_max_num_seqs` places; `noria_worker_kv_tokens_used` is that for
`noria_worker_kv_tokens`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import CollectorRegistry

from noria.service.metrics import STEP_BUCKETS, LiveCollector, counter, counters, gauge, info
from worker.accounting import Accounts
from worker.engine_output import EngineLoad, EngineOutput
from worker.scheduled import SequenceUpdate

_TOKENS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker holds now. Sizes are in blocks, and in tokens per block; 0 while it loads."""

    load: EngineLoad = field(default_factory=EngineLoad)
    max_num_seqs: int = 0
    num_blocks: int = 0
    block_size: int = 0
    live_submits: int = 0
    step_age_s: float = 0.0
    draining: bool = False
    accounts: Accounts = field(default_factory=Accounts)
    about: tuple[tuple[str, str], ...] = ()


class WorkerMetrics:
    """Observes every engine output; reads the rest from `state` when it is asked.

    Make it on the event loop, and call it there.
    """

    def __init__(self, registry: CollectorRegistry, state: Callable[[], WorkerState]) -> None:
        self._step_s = Histogram(
            "noria_worker_step_seconds",
            "Duration of an engine step.",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self._step_tokens = Histogram(
            "noria_worker_step_tokens",
            "Positions computed in an engine step.",
            buckets=_TOKENS_BUCKETS,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "noria_worker_prompt_tokens_computed",
            "Prompt positions computed, those computed again included.",
            registry=registry,
        )
        self._generated_tokens = Counter(
            "noria_worker_generated_tokens", "Tokens chosen.", registry=registry
        )
        self._failed_batches = Counter(
            "noria_worker_failed_batches", "Batches that raised.", registry=registry
        )
        registry.register(LiveCollector(lambda: _live(state())))

    def observe(self, output: EngineOutput) -> None:
        """Count what one turn of the engine did."""
        if output.failure is not None:
            self._failed_batches.inc()
        if output.output is None:
            return
        self._step_s.observe(output.step_s)
        self._step_tokens.observe(output.output.num_tokens)
        self._generated_tokens.inc(sum(update.token is not None for update in output.updates))
        self._prompt_tokens.inc(sum(map(_prompt_positions, output.updates)))


def _prompt_positions(update: SequenceUpdate) -> int:
    """How many of the positions just computed belong to the prompt."""
    first = update.scheduled.first_position
    left = len(update.sequence.prompt_token_ids) - first
    return max(0, min(left, update.scheduled.num_tokens))


def _live(state: WorkerState) -> Iterable[Metric]:
    yield info("noria_worker", "What this worker serves, and how.", dict(state.about))
    yield from _sequences(state)
    yield from _kv(state)
    yield from _steps(state)
    yield from _accounts(state.accounts)


def _sequences(state: WorkerState) -> Iterable[Metric]:
    load = state.load
    return (
        gauge("noria_worker_running_sequences", "Sequences in the batch.", load.running),
        gauge("noria_worker_waiting_sequences", "Sequences not in the batch yet.", load.waiting),
        gauge(
            "noria_worker_waiting_tokens",
            "Tokens that waiting sequences have yet to compute.",
            load.waiting_tokens,
        ),
        gauge(
            "noria_worker_preparing_sequences",
            "Sequences that wait for a grammar, or with it for room.",
            load.preparing,
        ),
        gauge("noria_worker_max_num_seqs", "Places in the batch.", state.max_num_seqs),
        gauge("noria_worker_live_submits", "Submits without a last entry yet.", state.live_submits),
        gauge("noria_worker_draining", "1 while nothing new is taken, else 0.", state.draining),
        counter(
            "noria_worker_preemptions",
            "Times that a sequence gave its blocks back to go on later.",
            load.preemptions,
        ),
    )


def _kv(state: WorkerState) -> Iterable[Metric]:
    # Before the engine stands nothing has told of free blocks.
    used = max(0, state.num_blocks - state.load.free_blocks)
    return (
        gauge("noria_worker_kv_blocks_used", "KV blocks held by sequences.", used),
        gauge(
            "noria_worker_kv_blocks_cached",
            "KV blocks that nobody holds and that keep a prefix.",
            state.load.cached_blocks,
        ),
        gauge("noria_worker_kv_blocks", "KV blocks there are.", state.num_blocks),
        gauge(
            "noria_worker_kv_tokens_used",
            "Tokens that the KV blocks held by sequences have room for.",
            used * state.block_size,
        ),
        gauge(
            "noria_worker_kv_tokens",
            "Tokens that all KV blocks have room for.",
            state.num_blocks * state.block_size,
        ),
    )


def _steps(state: WorkerState) -> Iterable[Metric]:
    load = state.load
    return (
        gauge(
            "noria_worker_step_age_seconds",
            "For how long the step now running has been running; 0 when none is.",
            state.step_age_s,
        ),
        counter("noria_worker_steps", "Engine steps.", load.step_count),
        counter(
            "noria_worker_busy_seconds", "Time in which steps were computed.", load.busy_us / 1e6
        ),
    )


def _accounts(accounts: Accounts) -> Iterable[Metric]:
    """At rest the device time of both outcomes together is the busy time."""
    works = {"told": accounts.told, "lost": accounts.lost}
    tokens: dict[tuple[str, ...], float] = {}
    for outcome, work in works.items():
        tokens[outcome, "prompt"] = work.prompt_tokens
        tokens[outcome, "cached_prompt"] = work.cached_tokens
        tokens[outcome, "generated"] = work.generated_tokens
    yield counters(
        "noria_worker_device_seconds",
        "Busy time of submits that ended: told to their routers, or lost with the session.",
        ("outcome",),
        {(outcome,): work.device_us / 1e6 for outcome, work in works.items()},
    )
    yield counters(
        "noria_worker_accounted_tokens",
        "Tokens of submits that ended: told to their routers, or lost with the session.",
        ("outcome", "kind"),
        tokens,
    )
