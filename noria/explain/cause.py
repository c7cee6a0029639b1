"""What made a request slow: one cause, with its remedy.

Three things are held against what people notice, each with the time it lost:

- A late start: the first text came later than LATE_START_US; what is beyond that is lost.
  The largest stretch of the time is at fault:
    waiting, in the router or for the batch   -> TOO_FEW_REPLICAS
    prefill with positions computed again     -> PREEMPTION
    prefill, in steps that were mostly        -> CROWDED_BATCH
      others' (own share of them < half of it)
    prefill of LONG_PROMPT tokens or more, of -> PREFIX_AGAIN
      which earlier turns are MOSTLY_EARLIER or more and not even half of those came from
      a prefix cache
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
- SLOW_TOKEN_US, 20 tokens a second: three times as fast as people read; below it an answer
  begins to be waited for.
- MIN_TOKENS, 4: fewer say nothing of a pace.
- LONG_PROMPT, 256: shorter ones are one step of the default budget (512), half used.
- MOSTLY_EARLIER, a half: then the last turn alone would have started in half the time.
- CROWD, 8: a step reads all weights whatever its size, so that a few more rows cost little;
  eight and more add up, on a CPU above all.
- LARGE_KV, 2,048: there, reading K and V takes a share of a small model's step that can be
  felt. In short contexts the weights' share hides it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from statistics import fmean, median

from noria.explain import times as t
from noria.explain.observation import Observation
from noria.explain.steps import Stage, Step
from noria.explain.times import Pace, Times
from noria.explain.words import counted, duration, percent

LATE_START_US = 500_000
SLOW_TOKEN_US = 50_000
MIN_TOKENS = 4
LONG_PROMPT = 256
MOSTLY_EARLIER = 0.5
CROWD = 8
LARGE_KV = 2_048

_REPLICAS = "start more workers (`noria up --workers N`)"


class Cause(Enum):
    """What made a request slow."""

    TOO_FEW_REPLICAS = auto()
    LONG_PROMPT = auto()
    PREFIX_AGAIN = auto()
    CROWDED_BATCH = auto()
    LARGE_KV_CACHE = auto()
    PREEMPTION = auto()
    OTHER = auto()
    NOTHING = auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause, and a sentence that names it with its remedy; `lost_us` is what it cost."""

    cause: Cause
    sentence: str
    lost_us: float = 0.0


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
    def pauses(self) -> list[int]:
        """Each time for which the tokens stopped because of a preemption, in microseconds."""
        return _pauses(self.steps, self.pace)


def verdict_of(evidence: Evidence) -> Verdict:
    """The cause that lost the most time."""
    failure = evidence.seen.failure
    if failure is not None and failure.reason == "QUEUE_FULL":
        sentence = f"All workers are busy and the queue is full: {_REPLICAS}, or ask again later."
        return Verdict(Cause.TOO_FEW_REPLICAS, sentence)
    if failure is not None and failure.reason != "DEADLINE_EXCEEDED":
        return Verdict(Cause.OTHER, failure.advice)
    found = [f for f in (_late_start(evidence), _slow_pace(evidence), _preempted(evidence)) if f]
    if found:
        return max(found, key=lambda finding: finding.lost_us)
    return Verdict(Cause.NOTHING, _nothing(evidence) if failure is None else failure.advice)


def _late_start(evidence: Evidence) -> Verdict | None:
    lost_us = evidence.start_us - LATE_START_US
    if lost_us <= 0:
        return None
    times = evidence.times
    heard = evidence.pace.first_us is not None or times[t.PREFILL] > 0
    if not heard and times.longest() == t.BATCH_WAIT:
        # Nobody said whether the worker had begun: it may have been computing all the while.
        return None
    waiting_us = times.waiting_us
    others = max(us for name, us in times.stretches.items() if name not in _JUDGED)
    if waiting_us >= max(times[t.PREFILL], others):
        return _waited(evidence, waiting_us, lost_us)
    if times[t.PREFILL] >= others:
        return _slow_prefill(evidence, lost_us)
    return _elsewhere(evidence, "The start was late", lost_us)


_JUDGED = {t.QUEUE, t.BATCH_WAIT, t.PREFILL, t.DECODE}


def _waited(evidence: Evidence, waiting_us: int, lost_us: float) -> Verdict:
    sentence = (
        f"It waited {duration(waiting_us)} of {duration(evidence.start_us)} for a place in a "
        f"batch: too few replicas for what came at once; {_REPLICAS}, or let each take more at "
        "a time (`--max-num-seqs`) while its KV memory allows."
    )
    return Verdict(Cause.TOO_FEW_REPLICAS, sentence, lost_us)


def _slow_prefill(evidence: Evidence, lost_us: float) -> Verdict:
    prefill_us = evidence.times[t.PREFILL]
    took = f"{duration(prefill_us)} of {duration(evidence.start_us)}"
    steps = evidence.before_first_token
    if any(step.stage is Stage.AGAIN for step in steps):
        return _preemption(evidence, prefill_us, lost_us)
    if steps and evidence.own_prefill_us < prefill_us / 2:
        return _crowded(
            f"Its prompt was computed in steps that were mostly others' ({took})", lost_us
        )
    num_prompt = evidence.seen.timeline.usage.input_tokens
    if num_prompt < LONG_PROMPT:
        prompt = counted(num_prompt, "prompt token")
        return _slow_model(f"Computing {prompt} took {took}", lost_us)
    if _is_repeated(evidence):
        return _prefix_again(evidence, took, lost_us)
    sentence = (
        f"The start was late because the prompt is long: its {num_prompt:,} tokens are computed "
        f"before the first one is chosen ({took}); send less context, or let a step compute "
        "more of a prompt (`--max-num-batched-tokens`)."
    )
    return Verdict(Cause.LONG_PROMPT, sentence, lost_us)


def _is_repeated(evidence: Evidence) -> bool:
    usage, share = evidence.seen.timeline.usage, evidence.seen.asked.earlier_share
    return share >= MOSTLY_EARLIER and usage.cached_tokens < usage.input_tokens * share / 2


def _prefix_again(evidence: Evidence, took: str, lost_us: float) -> Verdict:
    usage = evidence.seen.timeline.usage
    sentence = (
        f"About {percent(evidence.seen.asked.earlier_share)} of the prompt's "
        f"{usage.input_tokens:,} tokens are the conversation's earlier turns, whose prefix was "
        f"computed again ({usage.cached_tokens:,} tokens came from a prefix cache): prefill took "
        f"{took}; send fewer earlier turns, or a summary of them, or keep more of the cache "
        "(`--num-blocks`)."
    )
    return Verdict(Cause.PREFIX_AGAIN, sentence, lost_us)


def _slow_pace(evidence: Evidence) -> Verdict | None:
    pace, decodes = evidence.pace, evidence.decodes
    lost_us = (pace.between_us - SLOW_TOKEN_US) * (pace.num_tokens - 1)
    if pace.num_tokens < MIN_TOKENS or lost_us <= 0 or not decodes:
        return None
    if sum(evidence.pauses) >= lost_us / 2:
        return _preemption(evidence, sum(evidence.pauses), lost_us)
    apart = f"A token came every {duration(pace.between_us)}"
    step_us = fmean(step.record.step_us for step in decodes)
    if step_us < pace.between_us / 2:
        slow = f"{apart}, though a step took only {duration(step_us)}"
        return _elsewhere(evidence, slow, lost_us)
    beside = fmean(step.record.batch_positions - 1 for step in decodes)
    if beside >= CROWD:
        return _crowded(
            f"{apart}: its steps computed {beside:.0f} positions of others beside its own", lost_us
        )
    kv_tokens = round(median(step.record.kv_tokens for step in decodes))
    if kv_tokens >= LARGE_KV:
        return _large_kv(f"{apart}: each step read", kv_tokens, lost_us)
    return _slow_model(f"A step took {duration(step_us)}, though its batch was small", lost_us)


def _crowded(what: str, lost_us: float) -> Verdict:
    sentence = (
        f"{what}, a crowded batch; {_REPLICAS}, or let fewer requests (`--max-num-seqs`) or "
        "smaller chunks of prompts (`--max-num-batched-tokens`) into one step."
    )
    return Verdict(Cause.CROWDED_BATCH, sentence, lost_us)


def _large_kv(what: str, kv_tokens: int, lost_us: float) -> Verdict:
    sentence = (
        f"{what} the keys and values of about {kv_tokens:,} tokens from a large KV cache; send "
        "less context, or use a model with fewer KV heads or faster memory."
    )
    return Verdict(Cause.LARGE_KV_CACHE, sentence, lost_us)


def _preempted(evidence: Evidence) -> Verdict | None:
    if not evidence.pauses:
        return None
    pause_us = sum(evidence.pauses)
    return _preemption(evidence, pause_us, pause_us)


def _preemption(evidence: Evidence, pause_us: float, lost_us: float) -> Verdict:
    times = max(1, evidence.seen.timeline.preemptions, len(evidence.pauses))
    sentence = (
        f"It lost its place in the batch {counted(times, 'time')}, since KV memory ran out, and "
        f"its tokens were computed again ({duration(pause_us)}); give workers more KV blocks "
        f"(`--num-blocks`), let in fewer at a time (`--max-num-seqs`), or {_REPLICAS}."
    )
    return Verdict(Cause.PREEMPTION, sentence, lost_us)


def _slow_model(what: str, lost_us: float) -> Verdict:
    sentence = f"{what}: this model is slow here; a smaller one or faster hardware would help."
    return Verdict(Cause.OTHER, sentence, lost_us)


def _elsewhere(evidence: Evidence, what: str, lost_us: float) -> Verdict:
    outside = {k: us for k, us in evidence.times.stretches.items() if k not in _JUDGED}
    name = max(outside, key=outside.__getitem__)
    sentence = (
        f"{what}: the time went outside the model, most of it as {name} "
        f"({duration(outside[name])})."
    )
    return Verdict(Cause.OTHER, sentence, lost_us)


def _nothing(evidence: Evidence) -> str:
    name = evidence.times.longest()
    share = evidence.times[name] / max(1, evidence.times.wall_us)
    return (
        f"Nothing unusual: the start was prompt and the pace steady; {percent(share)} was {name}."
    )


def _pauses(steps: Sequence[Step], pace: Pace) -> list[int]:
    """From the last token before each preemption to the next one, less a usual interval.

    Where both came at once, or no token was there before, the time of the steps that
    computed again.
    """
    pauses: list[int] = []
    last_at: int | None = None
    again_us = 0
    for step in steps:
        if step.stage is Stage.AGAIN:
            again_us += step.record.step_us
        if step.chosen is None:
            continue
        if again_us:
            gap_us = 0 if last_at is None else step.at_us - last_at - round(pace.usual_us)
            pauses.append(max(again_us, gap_us))
            again_us = 0
        last_at = step.at_us
    return pauses
