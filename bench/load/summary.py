"""The figures of a run."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from bench.load.outcome import Outcome
from bench.load.runner import Run


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds; linear between neighbours. All 0 where nothing was measured."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Percentiles":
        values = np.fromiter(seconds, float) * 1e3
        if not values.size:
            return cls()
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(p50, p90, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to count as good, in milliseconds; None: anything."""

    ttft_ms: float | None = None
    inter_token_ms: float | None = None

    def is_met(self, outcome: Outcome) -> bool:
        return outcome.is_sound and all(
            limit is None or value is None or value * 1e3 <= limit
            for limit, value in (
                (self.ttft_ms, outcome.ttft_s),
                (self.inter_token_ms, outcome.inter_token_s),
            )
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Rates are per second of the whole run, latencies of requests that were served as asked.

    `message_gap_ms` is the time between neighbouring messages of a stream, `ended` how many
    ended how, `faults` what was wrong with served streams. `goodput` counts requests that met
    the objective. `generator_cpu` is the share of one core that the generator took.
    """

    requests: int
    wall_s: float
    ended: dict[str, int]
    faults: dict[str, int]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float
    tokens_per_message: float
    ttft_ms: Percentiles
    inter_token_ms: Percentiles
    message_gap_ms: Percentiles
    end_to_end_ms: Percentiles
    generator_cpu: float
    generator_late_ms: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(run: Run, objective: Objective) -> Summary:
    """The figures of a run that has ended."""
    ended = [outcome for outcome in run.outcomes if outcome.ended]
    served = [outcome for outcome in ended if outcome.is_served]
    sound = [outcome for outcome in served if outcome.is_sound]
    wall_s = run.wall_s or float("nan")
    input_tokens = sum(outcome.input_tokens for outcome in served)
    output_tokens = sum(outcome.output_tokens for outcome in served)
    messages = sum(len(outcome.message_times) for outcome in served)
    return Summary(
        requests=len(ended),
        wall_s=run.wall_s,
        ended=dict(Counter(outcome.ended for outcome in ended).most_common()),
        faults=dict(Counter(o.fault for o in served if o.fault).most_common()),
        input_tokens=input_tokens,
        cached_tokens=sum(outcome.cached_tokens for outcome in served),
        output_tokens=output_tokens,
        requests_per_s=len(served) / wall_s,
        output_tokens_per_s=output_tokens / wall_s,
        total_tokens_per_s=(input_tokens + output_tokens) / wall_s,
        goodput_per_s=sum(map(objective.is_met, served)) / wall_s,
        tokens_per_message=output_tokens / messages if messages else 0.0,
        ttft_ms=Percentiles.of(_known(outcome.ttft_s for outcome in sound)),
        inter_token_ms=Percentiles.of(_known(outcome.inter_token_s for outcome in sound)),
        message_gap_ms=Percentiles.of(_gaps(sound)),
        end_to_end_ms=Percentiles.of(outcome.end_to_end_s for outcome in sound),
        generator_cpu=run.cpu_s / wall_s,
        generator_late_ms=run.late_s * 1e3,
    )


def _known(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None)


def _gaps(outcomes: Sequence[Outcome]) -> Iterable[float]:
    for outcome in outcomes:
        for earlier, later in pairwise(outcome.message_times):
            yield later - earlier
