"""The story of one request: all that is told of it, as plain data."""

from collections.abc import Sequence
from dataclasses import dataclass

from noria.explain.cause import Evidence, verdict_of
from noria.explain.life import Row, life_of
from noria.explain.observation import Observation
from noria.explain.steps import Step, steps_of
from noria.explain.times import Pace, Times, pace_of, times_of
from noria.explain.verdict import Verdict
from noria.v1 import chat_pb2


@dataclass(frozen=True, slots=True)
class Story:
    """The stations, the engine's steps, where the time went, and what made it slow."""

    life: Sequence[Row]
    steps: Sequence[Step]
    times: Times
    pace: Pace
    verdict: Verdict
    request_id: str
    ended_with_eos: bool
    has_timeline: bool


def story_of(seen: Observation) -> Story:
    """Tell what was seen. A pure function: the same observation gives the same story."""
    steps = steps_of(seen)
    times, pace = times_of(seen), pace_of(seen, steps)
    verdict = verdict_of(Evidence(seen, steps, times, pace))
    eos = seen.end is not None and seen.end.stop_reason == chat_pb2.STOP_REASON_END_TURN
    return Story(
        life=life_of(seen, steps, times, pace),
        steps=steps,
        times=times,
        pace=pace,
        verdict=verdict,
        request_id=seen.request_id,
        ended_with_eos=eos,
        has_timeline=bool(seen.timeline.request_id),
    )
