"""What a client sees of a request, for `noria.explain`: seen on a stack, or made by hand."""

import time

from noria import NoriaError
from noria.explain.observation import Arrival, Asked, Failure, Observation
from noria.v1 import chat_pb2, common_pb2


async def observe(client, turns, **options):
    """Ask over an AsyncClient with `trace_steps`, and note all that comes, and when."""
    arrivals, begun = [], time.monotonic()
    asked = Asked(turns, options.get("system"), options.get("max_tokens"))
    timeline, failure = common_pb2.Timeline(), None
    try:
        async with client.stream_chat(turns, trace_steps=True, **options) as stream:
            async for event in stream.events():
                arrivals.append(Arrival(_us_since(begun), event))
        timeline = stream.result.timeline
    except NoriaError as error:
        timeline = error.timeline or timeline
        failure = Failure(error.reason.value, error.message, "advice", error.request_id)
    return Observation(asked, _us_since(begun), arrivals, timeline, failure)


def _us_since(begun):
    return round((time.monotonic() - begun) * 1e6)


def record(first, count=1, *, token=None, piece=b"x", kv=None, beside=0, step_us=10_000):
    """A StepRecord of positions [first, first + count), with so many positions of others."""
    return common_pb2.StepRecord(
        first_position=first, num_positions=count, batch_positions=count + beside,
        batch_size=1 + beside, token_id=token, token_bytes=piece if token is not None else b"",
        probability=0.5, kv_tokens=first + count if kv is None else kv, kv_blocks=1,
        hidden_size=8, step_us=step_us,
    )  # fmt: skip


def delta(at_us, *records, text="x"):
    """A content_block_delta that came then."""
    content = chat_pb2.ContentBlockDelta(text=text, steps=records)
    return Arrival(at_us, chat_pb2.StreamEvent(content_block_delta=content))


def timeline(*, prompt=16, cached=0, total_us=None, preemptions=0, **phases_us):
    """A Timeline with these phases, named as in PhaseKind without its prefix."""
    return common_pb2.Timeline(
        request_id="req-1",
        phases=[
            common_pb2.Phase(
                kind=common_pb2.PhaseKind.Value(f"PHASE_KIND_{k.upper()}"), duration_us=us
            )
            for k, us in phases_us.items()
        ],
        total_us=sum(phases_us.values()) if total_us is None else total_us,
        usage=common_pb2.Usage(input_tokens=prompt, cached_tokens=cached),
        worker_id="w1",
        attempts=1,
        preemptions=preemptions,
    )


def answer(num_tokens, *, prompt=16, first_us=100_000, every_us=20_000, **fields):
    """Arrivals of a prefill and `num_tokens` tokens; `fields` are those of each record."""
    arrivals = [delta(first_us, record(0, prompt, token=7, **fields))]
    for index in range(num_tokens - 1):
        step = record(prompt + index, token=7, **fields)
        arrivals.append(delta(first_us + every_us * (index + 1), step))
    return arrivals
