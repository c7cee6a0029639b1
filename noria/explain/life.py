"""The stations of a request's life, as far as it came, one row each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from noria.explain import times as t
from noria.explain.observation import Failure, Observation
from noria.explain.steps import Stage, Step, Token
from noria.explain.times import Pace, Times
from noria.explain.words import counted, duration, positions, probability, quoted, token_text
from noria.v1 import chat_pb2, common_pb2

CLIENT, ROUTER, TOKENIZER, WORKER, ALL = "client", "router", "tokenizer", "worker", "all"
_MAX_RUNNERS_UP = 2
_SHOWN_TEXT = 80


@dataclass(frozen=True, slots=True)
class Row:
    """What happened where; `took_us` is absent where no time of its own is known."""

    what: str
    where: str
    told: str
    took_us: int | None = None


def life_of(seen: Observation, steps: Sequence[Step], times: Times, pace: Pace) -> list[Row]:
    """All stations that the request reached; the last tells how it ended."""
    rows = [
        *_asked(seen),
        *_before_the_batch(seen, times),
        *_in_the_batch(seen, steps, times, pace),
    ]
    if seen.failure is not None:
        rows.append(_failed(seen, seen.failure))
    elif seen.end is not None:
        rows += _ended(seen, seen.end, steps)
    return rows


def _asked(seen: Observation) -> Iterator[Row]:
    asked = seen.asked
    yield Row("question sent", CLIENT, quoted(asked.question, _SHOWN_TEXT))
    parts = [
        "" if asked.system is None else f"system text {quoted(asked.system, 40)}",
        counted(asked.num_earlier_turns, "earlier turn") if asked.num_earlier_turns else "",
        f"max_tokens {'left open' if asked.max_tokens is None else asked.max_tokens}",
        _temperature(asked.temperature),
        "streamed",
    ]
    yield Row("request made", CLIENT, ", ".join(filter(None, parts)))


def _temperature(asked: float | None) -> str:
    if asked is None:
        return "temperature 1.0 by default"
    return f"temperature {asked:g}" if asked else "temperature 0: the likeliest token each time"


def _before_the_batch(seen: Observation, times: Times) -> Iterator[Row]:
    timeline = seen.timeline
    if not timeline.request_id:
        return
    told = f"accepted, for model {seen.model}" if seen.model else "accepted"
    yield Row("key checked", ROUTER, told, times[t.CHECKS])
    if timeline.usage.input_tokens:
        ids = counted(timeline.usage.input_tokens, "token")
        told = f"template and text cut into {ids}, from here on ids alone"
        yield Row("cut into tokens", TOKENIZER, told, times[t.TOKENIZING])
    if timeline.HasField("queue_position"):
        told = f"in line with {counted(timeline.queue_position, 'request')} in front"
        yield Row("turn awaited", ROUTER, told, times[t.QUEUE])


def _in_the_batch(
    seen: Observation, steps: Sequence[Step], times: Times, pace: Pace
) -> Iterator[Row]:
    timeline = seen.timeline
    if timeline.worker_id:
        others = f", with {counted(steps[0].record.batch_size - 1, 'other')}" if steps else ""
        attempt = f", attempt {timeline.attempts}" if timeline.attempts > 1 else ""
        told = f"at {timeline.worker_id}{others}{attempt}"
        yield Row("joined to a batch", WORKER, told, times[t.BATCH_WAIT])
    prefill = [step for step in steps if step.stage is Stage.PREFILL]
    if prefill:
        yield _prefill(prefill, times)
    if steps and steps[0].record.attention_backend:
        yield Row("computed by", WORKER, _backend(steps[0].record))
    if (first := next((step for step in steps if step.chosen), None)) is not None:
        yield Row("first token chosen", WORKER, _first_token(first))
    if seen.first_text is not None:
        text = quoted(seen.first_text.event.content_block_delta.text, 40)
        after = f", {duration(pace.first_us or 0)} after the question"
        yield Row("sent at once", ALL, f"content_block_delta {text}{after}")
    decode = [step for step in steps if step.stage is Stage.DECODE]
    if decode:
        yield _decode(decode, times)
    again = sum(step.record.num_positions for step in steps if step.stage is Stage.AGAIN)
    if again:
        told = f"KV memory ran out; {counted(again, 'position')} computed again"
        yield Row("place lost", WORKER, told)


def _prefill(steps: Sequence[Step], times: Times) -> Row:
    first, last = steps[0].record, steps[-1].record
    shape = f"[{first.num_positions}, {first.hidden_size}]"
    how = f"at once, {shape}" if len(steps) == 1 else f"in {len(steps)} chunks, the first {shape}"
    computed = positions(first.first_position, steps[-1].last_position)
    told = f"the prompt's positions {computed} computed {how}; "
    if first.first_position:
        told += f"{counted(first.first_position, 'token')} came from the prefix cache; "
    told += f"keys and values kept: KV {last.kv_tokens:,}"
    return Row("prefill", WORKER, told, times[t.PREFILL])


def _backend(record: common_pb2.StepRecord) -> str:
    """And whether the same request would have the same answer in another batch."""
    bits = "are the same" if record.row_exact else "may differ a little"
    return f"{record.attention_backend}: its logits {bits} in any other batch"


def _first_token(step: Step) -> str:
    token = step.chosen
    if token is None:
        raise ValueError("a step that chose no token")
    told = f"{_with_id(token)} at {probability(token.probability)}"
    others = [
        f"{_with_id(Token(other.id, other.bytes))} at {probability(other.probability)}"
        for other in step.record.runners_up[:_MAX_RUNNERS_UP]
    ]
    return f"{told}, before {' and '.join(others)}" if others else told


def _with_id(token: Token) -> str:
    return f"{token_text(token)} ({token.id})" if token.piece else token_text(token)


def _decode(steps: Sequence[Step], times: Times) -> Row:
    first, last = steps[0].record, steps[-1].record
    kv = f"{first.kv_tokens:,} to {last.kv_tokens:,}"
    told = f"{counted(len(steps), 'step')}: each computes the newest token's position and "
    told += f"chooses the next; KV {kv}"
    return Row("decode", WORKER, told, times[t.DECODE])


def _ended(seen: Observation, end: chat_pb2.MessageDelta, steps: Sequence[Step]) -> Iterator[Row]:
    yield Row("stop", WORKER, _stop(seen, end, steps))
    if wasted := seen.timeline.wasted_tokens:
        told = f"{counted(wasted, 'token')} computed beyond the stop, not sent, not charged"
        yield Row("wasted", WORKER, told)
    if steps:
        last = steps[-1].record
        told = f"KV of {counted(last.kv_tokens, 'token')} in {counted(last.kv_blocks, 'block')}"
        told += "; full blocks stay as prefix cache until others need them"
        yield Row("memory released", WORKER, told)


def _stop(seen: Observation, end: chat_pb2.MessageDelta, steps: Sequence[Step]) -> str:
    reason = chat_pb2.StopReason.Name(end.stop_reason).removeprefix("STOP_REASON_").lower()
    told = f"message_delta {reason}, then message_stop"
    chosen = steps[-1].chosen if steps else None
    match end.stop_reason:
        case chat_pb2.STOP_REASON_END_TURN:
            spelled = f" {_with_id(chosen)}" if chosen else ""
            return f"EOS{spelled} chosen, not sent as text; {told}"
        case chat_pb2.STOP_REASON_MAX_TOKENS:
            return f"{counted(end.usage.output_tokens, 'token')}, as many as allowed; {told}"
        case chat_pb2.STOP_REASON_STOP_SEQUENCE if end.HasField("stop_sequence"):
            return f"stop string {quoted(end.stop_sequence, 40)} found; {told}"
    return told


def _failed(seen: Observation, failure: Failure) -> Row:
    where = ROUTER if seen.request_id else CLIENT
    if seen.timeline.attempts:
        where = WORKER
    output = seen.timeline.usage.output_tokens
    told = f"{failure.reason}: {failure.message}"
    if output:
        told += f"; {counted(output, 'token')} sent until then"
    return Row("broken off" if output else "not served", where, told)
