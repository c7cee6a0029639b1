"""What a load asks for: replicas from the tokens to decode, and the TTFT to expect.

The two are planned apart: streaming changes how soon an answer begins, not what it costs.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one size that arrive at random.

    request_rate        requests/s over all replicas
    tokens_per_s        output tokens/s of one replica with a full batch, measured with
                        prompts of `input_len` in the mix
    prefill_tokens_per_s  prompt tokens/s of one replica; None: not known
    max_num_seqs        places in the batch of that measurement
    utilization         the part of a replica's tokens/s that is planned for
    """

    request_rate: float
    input_len: int
    output_len: int
    tokens_per_s: float
    prefill_tokens_per_s: float | None
    max_num_seqs: int
    utilization: float


@dataclass(frozen=True, slots=True)
class TTFT:
    """Seconds, the network's own aside. `busy` is the part of the time spent on prompts."""

    place_s: float
    prefill_queue_s: float
    prefill_s: float
    busy: float

    @property
    def total_s(self) -> float:
        return self.place_s + self.prefill_queue_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Fleet:
    """`at_full_load` would do if no replica ever idled; its queue would grow without bound.

    utilization     of the `replicas`, by decode tokens
    in_flight       requests that decode at once on one replica (Little's law)
    prefill_replicas  what prompts alone ask for; 0: not known
    ttft            None: prefill's speed is not known, or prompts alone overload the fleet
    """

    decode_tokens_per_s: float
    at_full_load: int
    replicas: int
    utilization: float
    in_flight: float
    prefill_replicas: int
    ttft: TTFT | None


def plan_fleet(load: Load) -> Fleet:
    """Replicas so that decode tokens demanded stay below the planned part of what they give."""
    demanded = load.request_rate * load.output_len
    replicas = max(1, _ceil(demanded / (load.tokens_per_s * load.utilization)))
    utilization = demanded / (replicas * load.tokens_per_s)
    return Fleet(
        decode_tokens_per_s=demanded,
        at_full_load=max(1, _ceil(demanded / load.tokens_per_s)),
        replicas=replicas,
        utilization=utilization,
        in_flight=load.max_num_seqs * utilization,
        prefill_replicas=_prefill_replicas(load),
        ttft=expected_ttft(load, replicas),
    )


def expected_ttft(load: Load, replicas: int) -> TTFT | None:
    """Wait for a place + wait for others' prompts + the prompt itself.

    prefill   t = input_len / prefill_tokens_per_s
    prompts   one after the other, arriving at random: M/D/1, busy x t / (2 (1 - busy)) with
              busy = (request_rate / replicas) x t
    place     N places, each held for S = output_len x N / tokens_per_s: M/M/N (Erlang C),
              C(N, u) x S / (N (1 - u)) with u the utilisation of decode
    """
    if load.prefill_tokens_per_s is None:
        return None
    rate = load.request_rate / replicas
    prefill = load.input_len / load.prefill_tokens_per_s
    busy, utilization = rate * prefill, rate * load.output_len / load.tokens_per_s
    if busy >= 1 or utilization >= 1:
        return None
    place = erlang_c(load.max_num_seqs, utilization) * load.output_len
    place /= load.tokens_per_s * (1 - utilization)
    return TTFT(place, busy * prefill / (2 * (1 - busy)), prefill, busy)


def erlang_c(servers: int, utilization: float) -> float:
    """The probability that an arrival finds all servers taken (Erlang 1917), by recursion."""
    offered, blocked = servers * utilization, 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - utilization * (1 - blocked))


def _prefill_replicas(load: Load) -> int:
    if load.prefill_tokens_per_s is None:
        return 0
    prompts = load.request_rate * load.input_len
    return max(1, _ceil(prompts / (load.prefill_tokens_per_s * load.utilization)))


def _ceil(value: float) -> int:
    """Upwards, but not for the last digit of a division."""
    return math.ceil(value - 1e-9)
