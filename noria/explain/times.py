"""Where a client's waiting time went, and at which pace the tokens came."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from noria.explain.observation import Observation
from noria.explain.steps import Step
from noria.v1 import common_pb2

NETWORK = "network"
CHECKS = "key and limits"
TOKENIZING = "tokenizing"
QUEUE = "waiting in the router"
BATCH_WAIT = "waiting for the batch"
PREFILL = "prefill"
DECODE = "decode"
DELIVERY = "delivery"
BETWEEN = "between the services"
OTHER = "other"

# In the order in which a request meets them.
_STRETCHES = (
    NETWORK, CHECKS, TOKENIZING, QUEUE, BATCH_WAIT, PREFILL, DECODE, DELIVERY, BETWEEN,
)  # fmt: skip
_OF_PHASE = {
    common_pb2.PHASE_KIND_ADMISSION: CHECKS,
    common_pb2.PHASE_KIND_ENCODE: TOKENIZING,
    common_pb2.PHASE_KIND_QUEUE: QUEUE,
    common_pb2.PHASE_KIND_BATCH_WAIT: BATCH_WAIT,
    common_pb2.PHASE_KIND_PREFILL: PREFILL,
    common_pb2.PHASE_KIND_DECODE: DECODE,
    common_pb2.PHASE_KIND_DETOKENIZE: TOKENIZING,
    common_pb2.PHASE_KIND_DELIVERY: DELIVERY,
    common_pb2.PHASE_KIND_TRANSPORT: BETWEEN,
}


@dataclass(frozen=True, slots=True)
class Times:
    """Disjoint stretches in microseconds, by name; their sum is the wall time."""

    stretches: dict[str, int]

    @property
    def wall_us(self) -> int:
        return sum(self.stretches.values())

    @property
    def waiting_us(self) -> int:
        """Until a place in a batch was free: in the router, then at the worker."""
        return self[QUEUE] + self[BATCH_WAIT]

    def __getitem__(self, name: str) -> int:
        return self.stretches.get(name, 0)

    def longest(self) -> str:
        """The name of the longest stretch."""
        return max(self.stretches, key=self.stretches.__getitem__)


def times_of(seen: Observation) -> Times:
    """The client's wall time in stretches.

    The router's phases are as it measured them. What the client waited beyond the router's
    total is the network: connecting, the way there, the way back.
    """
    stretches = dict.fromkeys(_STRETCHES, 0)
    for phase in seen.timeline.phases:
        name = _OF_PHASE.get(phase.kind, OTHER)
        stretches[name] = stretches.get(name, 0) + phase.duration_us
    # Two computers' clocks may run at slightly different rates: never less than nothing.
    stretches[NETWORK] = max(0, seen.wall_us - sum(stretches.values()))
    return Times(stretches)


@dataclass(frozen=True, slots=True)
class Pace:
    """When tokens reached the client, in microseconds.

    `first_us` is the time to the first text; `between_us` the mean time from one token to
    the next (inter-token latency), over `num_tokens`; `usual_us` is the median of these
    times, `longest_us` the longest.
    """

    first_us: int | None
    num_tokens: int = 0
    between_us: float = 0.0
    usual_us: float = 0.0
    longest_us: int = 0

    @property
    def tokens_per_second(self) -> float:
        """After the first token; 0 if there is none."""
        return 1e6 / self.between_us if self.between_us else 0.0


def pace_of(seen: Observation, steps: Sequence[Step]) -> Pace:
    """The pace at which the tokens of these steps came."""
    first = None if seen.first_text is None else seen.first_text.at_us
    arrivals = [step.at_us for step in steps if step.chosen is not None]
    if len(arrivals) < 2:
        return Pace(first, len(arrivals))
    gaps = [after - before for before, after in pairwise(arrivals)]
    return Pace(first, len(arrivals), fmean(gaps), median(gaps), max(gaps))


def tenths(us: Sequence[int]) -> list[int]:
    """Microseconds as tenths of a millisecond, rounded so that they add up as rounded.

    The largest remainders are rounded up (Hamilton's method), as many as the sum needs.
    """
    whole = [value // 100 for value in us]
    missing = round(sum(us) / 100) - sum(whole)
    by_remainder = sorted(range(len(us)), key=lambda i: us[i] % 100, reverse=True)
    for i in by_remainder[:missing]:
        whole[i] += 1
    return whole
