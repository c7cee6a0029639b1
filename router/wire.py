"""Translations between the router's plain data and the wire, and nothing else."""

from collections.abc import Sequence

from noria.v1 import chat_pb2, common_pb2, tokenizer_pb2, worker_pb2
from router.decode_slot import DecodeSlot, SlotText
from router.events import (
    AnswerUsage,
    BlockStart,
    BlockStop,
    Event,
    MessageEnd,
    MessageStart,
    StopReason,
    TextDelta,
)
from router.requests import Conversation, Generation, RawText, Sampling
from router.timeline import Phase, Reported
from router.token_stream import Finish, NewTokens, Refusal, TracedStep, WorkerReport
from router.worker_state import LoadReport, WorkerFigures

STOP_REASONS = {
    StopReason.END_TURN: chat_pb2.STOP_REASON_END_TURN,
    StopReason.MAX_TOKENS: chat_pb2.STOP_REASON_MAX_TOKENS,
    StopReason.STOP_SEQUENCE: chat_pb2.STOP_REASON_STOP_SEQUENCE,
}
_FINISHES = {
    worker_pb2.FINISH_REASON_EOS: Finish.EOS,
    worker_pb2.FINISH_REASON_STOP_ID: Finish.STOP_ID,
    worker_pb2.FINISH_REASON_LENGTH: Finish.LENGTH,
    worker_pb2.FINISH_REASON_ABORTED: Finish.ABORTED,
    worker_pb2.FINISH_REASON_EXPIRED: Finish.EXPIRED,
}
_REFUSALS: dict[int, Refusal] = {
    worker_pb2.REFUSAL_CODE_FULL: Refusal.FULL,
    worker_pb2.REFUSAL_CODE_DRAINING: Refusal.DRAINING,
    worker_pb2.REFUSAL_CODE_INVALID: Refusal.INVALID,
}
_ROLES = {
    "system": chat_pb2.ROLE_SYSTEM,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
}
# How many of the prompt's last ids a decode slot is opened with.
_PROMPT_TAIL = 8
# A worker's clock ends a request at this many milliseconds at the latest (a year).
_MAX_DEADLINE_MS = 366 * 24 * 3600 * 1000


def stream_event(event: Event) -> chat_pb2.StreamEvent:
    """An event of the one choice and its one block."""
    if isinstance(event, TextDelta):
        return chat_pb2.StreamEvent(content_block_delta=_text_delta(event))
    if isinstance(event, MessageStart):
        start = chat_pb2.MessageStart(
            request_id=event.request_id,
            model=event.model,
            usage=common_pb2.Usage(input_tokens=event.input_tokens),
        )
        return chat_pb2.StreamEvent(message_start=start)
    if isinstance(event, BlockStart):
        block = chat_pb2.ContentBlock(text=chat_pb2.TextBlock())
        return chat_pb2.StreamEvent(
            content_block_start=chat_pb2.ContentBlockStart(content_block=block)
        )
    if isinstance(event, BlockStop):
        return chat_pb2.StreamEvent(content_block_stop=chat_pb2.ContentBlockStop())
    if isinstance(event, MessageEnd):
        return chat_pb2.StreamEvent(message_delta=_message_delta(event))
    return chat_pb2.StreamEvent(message_stop=chat_pb2.MessageStop())


def _text_delta(event: TextDelta) -> chat_pb2.ContentBlockDelta:
    if not event.steps:
        return chat_pb2.ContentBlockDelta(text=event.text)
    delta = chat_pb2.ContentBlockDelta(steps=step_records(event.steps))
    if event.text:
        delta.text = event.text
    return delta


def step_records(steps: Sequence[object]) -> list[common_pb2.StepRecord]:
    """The engine's records, which pass through the router as they are."""
    return [step for step in steps if isinstance(step, common_pb2.StepRecord)]


def _message_delta(event: MessageEnd) -> chat_pb2.MessageDelta:
    return chat_pb2.MessageDelta(
        stop_reason=STOP_REASONS[event.stop_reason],
        stop_sequence=event.stop_sequence,
        usage=wire_usage(event.usage),
    )


def wire_usage(usage: AnswerUsage) -> common_pb2.Usage:
    """Token counts."""
    return common_pb2.Usage(
        input_tokens=usage.input_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
    )


def choice(text: str, steps: Sequence[object], end: MessageEnd) -> chat_pb2.Choice:
    """A whole answer: one text block, empty if there is no text."""
    return chat_pb2.Choice(
        content=[chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text=text))],
        stop_reason=STOP_REASONS[end.stop_reason],
        stop_sequence=end.stop_sequence,
        steps=step_records(steps),
        usage=wire_usage(end.usage),
    )


def encode_text_request(prompt: RawText, model: str) -> tokenizer_pb2.EncodeRequest:
    """The text, for the tokenizer's model of this name."""
    return tokenizer_pb2.EncodeRequest(
        model=model, text=prompt.text, add_special_tokens=prompt.add_special_tokens
    )


def encode_chat_request(chat: Conversation, model: str) -> tokenizer_pb2.EncodeChatRequest:
    """The conversation, for the tokenizer's model of this name."""
    messages = [
        chat_pb2.Message(
            role=_ROLES[turn.role],
            content=[chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text=t)) for t in turn.texts],
        )
        for turn in chat.turns
    ]
    spec = chat_pb2.ChatSpec(model=model, system=chat.system, messages=messages)
    return tokenizer_pb2.EncodeChatRequest(spec=spec)


def submit(
    generation: Generation, attempt: int, submit_number: int, now: float
) -> worker_pb2.SessionRequest:
    """One attempt; the deadline crosses as milliseconds left."""
    left_ms = min(max(0, int((generation.deadline - now) * 1000)), _MAX_DEADLINE_MS)
    return worker_pb2.SessionRequest(
        submit=worker_pb2.Submit(
            id=f"{generation.request_id}/{attempt}",
            submit_number=submit_number,
            prompt_token_ids=generation.prompt_token_ids,
            sampling=_sampling(generation.sampling, generation.seed),
            max_tokens=generation.max_tokens,
            priority=generation.priority,
            deadline_ms=left_ms,
            trace_steps=generation.trace_steps,
            traceparent=generation.traceparent,
            cache_salt=generation.cache_salt,
        )
    )


def _sampling(sampling: Sampling, seed: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )


def worker_figures(hello: worker_pb2.WorkerHello) -> WorkerFigures:
    """What a worker says of itself."""
    return WorkerFigures(
        instance_id=hello.instance_id,
        model=hello.model,
        aliases=tuple(hello.aliases),
        vocab_fingerprint=hello.vocab_fingerprint,
        max_model_len=hello.max_model_len,
        max_num_seqs=hello.max_num_seqs,
        block_size=max(1, hello.block_size),
        num_blocks=hello.num_blocks,
        default_max_tokens=hello.default_max_tokens,
    )


def load_report(load: worker_pb2.Load, now: float) -> LoadReport:
    """A worker's load, received now."""
    return LoadReport(
        received_at=now,
        last_submit_number=load.last_submit_number,
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        free_blocks=load.free_blocks,
        draining=load.draining,
        step_count=load.step_count,
        step_age_s=load.step_age_ms / 1000,
    )


def new_tokens(delta: worker_pb2.Delta, finish: Finish | None) -> NewTokens:
    """A step's news for one stream, which `finish` ends if it is there."""
    return NewTokens(
        token_ids=list(delta.token_ids),
        steps=[TracedStep(step, step.HasField("token_id")) for step in delta.steps],
        cached_tokens=delta.cached_tokens if delta.HasField("cached_tokens") else None,
        durations_us=_before_first_token(delta) if delta.HasField("prefill_us") else (),
        last_is_end=finish is Finish.EOS or finish is Finish.STOP_ID,
    )


def finishes_of(step: worker_pb2.Step) -> dict[int, Finish]:
    """Why each submit that ended in this step did, by number; the unknown count as aborts."""
    return {
        terminal.submit_number: _FINISHES.get(reason, Finish.ABORTED)
        for terminal in step.terminals
        for reason in terminal.finished.finish_reasons[:1]
    }


def worker_report(finished: worker_pb2.Finished) -> WorkerReport:
    """What a worker says of an attempt that ran."""
    return WorkerReport(
        output_tokens=next(iter(finished.output_tokens), 0),
        preemptions=finished.preemptions,
        durations_us=_before_first_token(finished),
        decode_us=finished.decode_us,
    )


def _before_first_token(report: worker_pb2.Delta | worker_pb2.Finished) -> Reported:
    return [(Phase.BATCH_WAIT, report.waiting_us), (Phase.PREFILL, report.prefill_us)]


def refusal_of(code: int) -> Refusal:
    """Why a worker refused; what is not known is the worker's fault."""
    return _REFUSALS.get(code, Refusal.INTERNAL)


def decode_open(slot: DecodeSlot, number: int, model: str) -> tokenizer_pb2.DecodeSessionRequest:
    """Open a slot with all ids so far."""
    options = slot.options
    return tokenizer_pb2.DecodeSessionRequest(
        open=tokenizer_pb2.DecodeOpen(
            slot=number,
            model=model,
            stop_sequences=options.stop_sequences,
            min_tokens=options.min_tokens,
            skip_special_tokens=options.skip_special_tokens,
            prompt_tail_ids=options.prompt_tail_ids[-_PROMPT_TAIL:],
            output_token_ids=slot.token_ids,
            starts_in_thinking=options.starts_in_thinking,
        )
    )


def decode_close(number: int, *, flush: bool) -> tokenizer_pb2.DecodeSessionRequest:
    """Close a slot, with what it holds back or without."""
    return tokenizer_pb2.DecodeSessionRequest(
        close=tokenizer_pb2.DecodeClose(slot=number, flush=flush)
    )


def slot_text(decoded: tokenizer_pb2.DecodedText) -> SlotText:
    """What became of a slot's ids."""
    return SlotText(
        byte_offset=decoded.byte_offset,
        text=decoded.text,
        num_ids=decoded.num_ids,
        stop=((decoded.stop.index, decoded.stop.token_index) if decoded.HasField("stop") else None),
        closed=decoded.closed,
        failed=bool(decoded.error),
        duration_us=decoded.duration_us,
    )
