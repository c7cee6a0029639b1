"""What is told of requests and models, on the wire."""

from noria.v1 import chat_pb2, common_pb2
from router import wire_events
from router.estimate import Estimate
from router.record import RequestRecord
from router.registry import ServedModel

TIMELINE_KEY = "noria-timeline-bin"
# Clients refuse metadata beyond some size, and an error's details travel beside it.
MAX_TIMELINE_BYTES = 2048
_MAX_NAME_BYTES = 256
_MAX_NOTE_BYTES = 512
_MAX_UINT32 = 2**32 - 1


def timeline(record: RequestRecord) -> common_pb2.Timeline:
    """The request's life until now or its end; the phases add up to `total_us`."""
    total_us, phases = record.timeline.read()
    told = common_pb2.Timeline(
        request_id=record.request_id,
        accepted_unix_us=record.accepted_unix_us,
        phases=[
            common_pb2.Phase(
                kind=common_pb2.PhaseKind.Value(f"PHASE_KIND_{phase.name}"), duration_us=us
            )
            for phase, us in phases
        ],
        total_us=total_us,
        first_delta_us=record.first_delta_us,
        usage=wire_events.wire_usage(record.usage),
        wasted_tokens=min(record.wasted_tokens, _MAX_UINT32),
        worker_id=_at_most(record.worker_id, _MAX_NAME_BYTES),
        attempts=record.attempts,
        preemptions=record.preemptions,
        seed=record.seed,
        queue_position=record.queue_position,
        routing_note=_at_most(record.routing_note, _MAX_NOTE_BYTES),
    )
    if record.reason is not None:
        told.reason = common_pb2.Reason.Value(f"REASON_{record.reason.value}")
    return told


def trailing_timeline(record: RequestRecord) -> tuple[tuple[str, bytes], ...]:
    """The timeline as trailing metadata, at most `MAX_TIMELINE_BYTES` long."""
    return ((TIMELINE_KEY, timeline(record).SerializeToString()),)


def request(record: RequestRecord) -> chat_pb2.GetRequestResponse:
    """A request's record, running or ended."""
    told = chat_pb2.GetRequestResponse(
        state=chat_pb2.RequestState.Value(f"REQUEST_STATE_{record.state.name}"),
        model=record.model,
        timeline=timeline(record),
    )
    wasted = record.wasted_tokens + record.late_tokens
    told.timeline.wasted_tokens = min(wasted, _MAX_UINT32)
    if record.stop_reason is not None and record.reason is None:
        told.stop_reason = wire_events.STOP_REASONS[record.stop_reason]
    return told


def estimate(result: Estimate) -> chat_pb2.EstimateChatResponse:
    """The dry run's outcome."""
    told = chat_pb2.EstimateChatResponse(
        input_tokens=result.input_tokens,
        max_tokens=result.max_tokens,
        reserved_tokens=result.reserved_tokens,
        kv_blocks=result.kv_blocks,
        queue_position=result.queue_position,
        worker_id=result.worker_id,
        routing_note=result.routing_note,
    )
    if result.refusal is not None:
        told.refusal = common_pb2.Reason.Value(f"REASON_{result.refusal.reason.value}")
        told.refusal_message = result.refusal.message
    return told


def model(served: ServedModel) -> chat_pb2.Model:
    """A served model; without a configured default, `max_tokens` is the room left."""
    limits = served.limits
    return chat_pb2.Model(
        name=limits.model,
        aliases=served.aliases,
        max_model_len=limits.max_model_len,
        default_max_tokens=limits.default_max_tokens or limits.max_model_len,
        workers=served.workers,
    )


def _at_most(text: str, max_bytes: int) -> str:
    """The beginning of a text, in whole characters."""
    return text.encode()[:max_bytes].decode(errors="ignore")
