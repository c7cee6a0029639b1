"""What made a request slow: one cause, with its remedy.

Three things are held against what people notice, each with the time it lost:

- A late start: the first text came later than LATE_START_US; what is beyond that is lost.
  The largest stretch of the time is at fault:
    waiting, in the router or for the batch   -> TOO_FEW_REPLICAS
    prefill with positions computed again     -> PREEMPTION
    prefill, in steps that were mostly        -> CROWDED_BATCH
      others' (own share of them < half of it)
    prefill of LONG_PROMPT tokens or more,    -> PREFIX_AGAIN
      where earlier turns are MOSTLY_EARLIER or more of the prompt, and less than half of
      them came from the prefix cache
    prefill of LONG_PROMPT tokens or more     -> LONG_PROMPT
- A slow pace: MIN_TOKENS or more, on average further apart than SLOW_TOKEN_US; what is
  beyond that, over all tokens, is lost.
    half of it or more in pauses by preemption        -> PREEMPTION
    CROWD or more other positions in its mean step    -> CROWDED_BATCH
    LARGE_KV tokens or more in the cache at most steps -> LARGE_KV_CACHE
- Pauses in which it was preempted: they are lost, however short.

The one that lost the most is named. Where none of the six fits, the largest stretch is
named as it is (OTHER). A request refused because the queue is full tells of too few
replicas too; every other failure is told with its own advice, except a passed deadline,
which is judged like a slow answer first.

The figures:

- LATE_START_US, half a second: a start within it seems prompt, and all that is not waiting
  or prefill takes some milliseconds.
- SLOW_TOKEN_US, 15 tokens a second: well over twice as fast as people read; below it an
  answer begins to be waited for.
- MIN_TOKENS, 4: fewer say nothing of a pace.
- LONG_PROMPT, 256: shorter ones are one step of the default budget (512), half used.
- MOSTLY_EARLIER, a half: then the last turn alone would have started in half the time.
- CROWD, 8: a step reads all weights whatever its size, so that a few more rows cost little;
  eight and more add up, on a CPU above all.
- LARGE_KV, 2,048: with a model of 135 million weights on two CPU cores a step of 45 ms over
  100 tokens takes 70 ms over 2,000; larger models hide more of it behind their weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from noria.explain import times as t
from noria.explain import verdict as v
from noria.explain.observation import Observation
from noria.explain.steps import Stage, Step
from noria.explain.times import Pace, Times
from noria.explain.verdict import Cause, Verdict
from noria.explain.words import counted, duration

LATE_START_US = 500_000
SLOW_TOKEN_US = 67_000
MIN_TOKENS = 4
LONG_PROMPT = 256
MOSTLY_EARLIER = 0.5
CROWD = 8
LARGE_KV = 2_048

_JUDGED = {t.QUEUE, t.BATCH_WAIT, t.PREFILL, t.DECODE}


@dataclass(frozen=True)
class Evidence:
    """What is known of the request."""

    seen: Observation
    steps: Sequence[Step]
    times: Times
    pace: Pace

    @property
    def start_us(self) -> int:
        """When the first text came; without any, how long it was waited for."""
        return self.times.wall_us if self.pace.first_us is None else self.pace.first_us

    @cached_property
    def before_first_token(self) -> list[Step]:
        """The steps up to the one that chose the first token."""
        chose = (i for i, step in enumerate(self.steps) if step.chosen is not None)
        return list(self.steps[: next(chose, len(self.steps)) + 1])

    @cached_property
    def decodes(self) -> list[Step]:
        return [step for step in self.steps if step.stage is Stage.DECODE]

    @property
    def own_prefill_us(self) -> float:
        """The request's share of the steps that prefilled it, by positions."""
        records = (step.record for step in self.before_first_token)
        return sum(r.step_us * r.num_positions / max(1, r.batch_positions) for r in records)

    @cached_property
    def pause_us(self) -> int:
        """For how long the tokens stopped because of preemptions."""
        return sum(self._pauses)

    @property
    def preemptions(self) -> int:
        return max(1, self.seen.timeline.preemptions, len(self._pauses))

    @cached_property
    def _pauses(self) -> list[int]:
        """From the last token before each preemption to the next one, less a usual interval.

        Where both came at once, or no token was there before, the time of the steps that
        computed again.
        """
        pauses: list[int] = []
        last_at: int | None = None
        again_us = 0
        for step in self.steps:
            if step.stage is Stage.AGAIN:
                again_us += step.record.step_us
            if step.chosen is None:
                continue
            if again_us:
                gap_us = 0 if last_at is None else step.at_us - last_at - round(self.pace.usual_us)
                pauses.append(max(again_us, gap_us))
                again_us = 0
            last_at = step.at_us
        return pauses

    def outside(self) -> tuple[str, int]:
        """The longest stretch that was neither waiting for a place nor computing."""
        stretches = self.times.stretches.items()
        return max(((k, us) for k, us in stretches if k not in _JUDGED), key=lambda item: item[1])


def verdict_of(evidence: Evidence) -> Verdict:
    """The cause that lost the most time."""
    failure = evidence.seen.failure
    if failure is not None and failure.reason == "QUEUE_FULL":
        return v.queue_full()
    if failure is not None and failure.reason != "DEADLINE_EXCEEDED":
        return Verdict(Cause.OTHER, failure.advice)
    found = [f for f in (_late_start(evidence), _slow_pace(evidence), _preempted(evidence)) if f]
    if found:
        return max(found, key=lambda finding: finding.lost_us)
    if failure is not None:
        return Verdict(Cause.OTHER, failure.advice)
    longest, times = evidence.times.longest(), evidence.times
    return v.nothing(longest, times[longest] / max(1, times.wall_us))


def _late_start(evidence: Evidence) -> Verdict | None:
    lost_us = evidence.start_us - LATE_START_US
    if lost_us <= 0:
        return None
    times = evidence.times
    heard = evidence.pace.first_us is not None or times[t.PREFILL] > 0
    if not heard and times.longest() == t.BATCH_WAIT:
        # Nobody said whether the worker had begun: it may have been computing all the while.
        return None
    outside, outside_us = evidence.outside()
    if times.waiting_us >= max(times[t.PREFILL], outside_us):
        return v.waited(times.waiting_us, evidence.start_us, lost_us)
    if times[t.PREFILL] >= outside_us:
        return _slow_prefill(evidence, lost_us)
    return v.elsewhere("The start was late", outside, outside_us, lost_us)


def _slow_prefill(evidence: Evidence, lost_us: float) -> Verdict:
    prefill_us, usage = evidence.times[t.PREFILL], evidence.seen.timeline.usage
    took = f"{duration(prefill_us)} of {duration(evidence.start_us)}"
    steps = evidence.before_first_token
    if any(step.stage is Stage.AGAIN for step in steps):
        return v.preemption(evidence.preemptions, prefill_us, lost_us)
    if steps and evidence.own_prefill_us < prefill_us / 2:
        what = f"Its prompt was computed in steps that were mostly others' ({took})"
        return v.crowded(what, lost_us)
    num_computed = usage.input_tokens - usage.cached_tokens
    if num_computed < LONG_PROMPT:
        prompt = counted(num_computed, "prompt token")
        return v.slow_model(f"Computing {prompt} took {took}", lost_us)
    share = evidence.seen.asked.earlier_share
    if share >= MOSTLY_EARLIER and usage.cached_tokens < usage.input_tokens * share / 2:
        return v.prefix_again(usage, share, took, lost_us)
    return v.long_prompt(usage, took, lost_us)


def _slow_pace(evidence: Evidence) -> Verdict | None:
    pace, decodes = evidence.pace, evidence.decodes
    lost_us = (pace.between_us - SLOW_TOKEN_US) * (pace.num_tokens - 1)
    if pace.num_tokens < MIN_TOKENS or lost_us <= 0 or not decodes:
        return None
    if evidence.pause_us >= lost_us / 2:
        return v.preemption(evidence.preemptions, evidence.pause_us, lost_us)
    apart = f"A token came every {duration(pace.between_us)}"
    step_us = fmean(step.record.step_us for step in decodes)
    if step_us < pace.between_us / 2:
        slow = f"{apart}, though a step took only {duration(step_us)}"
        return v.elsewhere(slow, *evidence.outside(), lost_us)
    beside = fmean(step.record.batch_positions - 1 for step in decodes)
    if beside >= CROWD:
        what = f"{apart}: its steps computed {beside:.0f} positions of others beside its own"
        return v.crowded(what, lost_us)
    kv_tokens = round(median(step.record.kv_tokens for step in decodes))
    if kv_tokens >= LARGE_KV:
        return v.large_kv(apart, kv_tokens, lost_us)
    return v.slow_model(f"A step took {duration(step_us)}, though its batch was small", lost_us)


def _preempted(evidence: Evidence) -> Verdict | None:
    if not evidence.pause_us:
        return None
    return v.preemption(evidence.preemptions, evidence.pause_us, evidence.pause_us)
