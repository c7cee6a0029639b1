"""Translations between the router's plain data and a worker's messages."""

from collections.abc import Sequence
from itertools import islice

from noria.service.wire_structured_output import structured_output
from noria.v1 import common_pb2, worker_pb2
from router.requests import Generation, Sampling
from router.timeline import Phase, Reported
from router.worker_news import (
    NO_WORK,
    ChosenToken,
    Finish,
    NewTokens,
    Refusal,
    TracedStep,
    Work,
    WorkerReport,
)
from router.worker_state import LoadReport, PriorityLoad, WorkerFigures

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
# A worker's clock ends a request at this many milliseconds at the latest (a year).
_MAX_DEADLINE_MS = 366 * 24 * 3600 * 1000


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
            n=generation.num_choices,
            priority=generation.priority,
            deadline_ms=left_ms,
            trace_steps=generation.trace_steps,
            traceparent=generation.traceparent,
            cache_salt=generation.cache_salt,
        )
    )


def _sampling(sampling: Sampling, seed: int) -> common_pb2.SamplingParams:
    grammar = sampling.grammar
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
        min_tokens=sampling.min_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        structured_output=structured_output(grammar.kind, grammar.texts) if grammar else None,
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
        yields_places=hello.yields_places,
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
        preparing=load.preparing,
        priorities=tuple(map(_priority_load, load.priorities)),
        cached_blocks=load.cached_blocks,
        tokens_per_second=load.tokens_per_second,
    )


def _priority_load(load: worker_pb2.PriorityLoad) -> PriorityLoad:
    return PriorityLoad(
        load.priority, load.running, load.waiting, load.waiting_tokens, load.yielded_blocks
    )


def new_tokens(delta: worker_pb2.Delta, finishes: Sequence[Finish]) -> NewTokens:
    """A step's news for one choice; `finishes` has those of all if their submit ended in it."""
    early = _FINISHES.get(delta.finish_reason)
    finish = finishes[delta.choice] if delta.choice < len(finishes) else early
    return NewTokens(
        token_ids=list(delta.token_ids),
        steps=[TracedStep(step, step.HasField("token_id")) for step in delta.steps],
        cached_tokens=delta.cached_tokens if delta.HasField("cached_tokens") else None,
        waited_us=delta.waiting_us if delta.HasField("waiting_us") else None,
        durations_us=_before_first_token(delta) if delta.HasField("prefill_us") else (),
        last_is_end=finish is Finish.EOS or finish is Finish.STOP_ID,
        choice=delta.choice,
        chosen=[_chosen_token(chosen) for chosen in delta.chosen],
        finish=early,
        prompt=_prompt_tokens(delta.prompt_logprobs) if delta.HasField("prompt_logprobs") else [],
    )


def _chosen_token(chosen: worker_pb2.ChosenToken) -> ChosenToken:
    alternatives = [(other.id, other.logprob) for other in chosen.alternatives]
    return ChosenToken(chosen.logprob, alternatives)


def _prompt_tokens(told: worker_pb2.PromptLogprobs) -> list[ChosenToken]:
    others = zip(told.alternative_ids, told.alternative_logprobs, strict=True)
    return [
        ChosenToken(own, list(islice(others, count)))
        for own, count in zip(told.logprobs, told.num_alternatives, strict=True)
    ]


def finishes_of(step: worker_pb2.Step) -> dict[int, tuple[Finish, ...]]:
    """Why each choice of the submits that ended in this step did, by the submits' numbers.

    Unknown reasons count as aborts.
    """
    return {
        terminal.submit_number: tuple(
            _FINISHES.get(reason, Finish.ABORTED) for reason in terminal.finished.finish_reasons
        )
        for terminal in step.terminals
        if terminal.HasField("finished")
    }


def worker_report(finished: worker_pb2.Finished) -> WorkerReport:
    """What a worker says of an attempt that ran."""
    return WorkerReport(
        output_tokens=sum(finished.output_tokens),
        preemptions=finished.preemptions,
        durations_us=_before_first_token(finished),
        decode_us=finished.decode_us,
        work=_work(finished, sum(finished.output_tokens)),
    )


def work_before(refused: worker_pb2.Refused) -> Work:
    """What was computed for an attempt that then could not go on."""
    return _work(refused.work, refused.work.output_tokens)


def _work(told: worker_pb2.Finished | worker_pb2.Work, output_tokens: int) -> Work:
    if not told.computed_tokens:
        return NO_WORK
    return Work(told.prompt_tokens, told.cached_tokens, output_tokens, told.device_us)


def _before_first_token(report: worker_pb2.Delta | worker_pb2.Finished) -> Reported:
    return [(Phase.BATCH_WAIT, report.waiting_us), (Phase.PREFILL, report.prefill_us)]


def refusal_of(code: int) -> Refusal:
    """Why a worker refused; what is not known is the worker's fault."""
    return _REFUSALS.get(code, Refusal.INTERNAL)
