"""Between the wire's messages and the engine's own terms. Nothing is decided here but validity."""

from collections.abc import Sequence as Ids
from dataclasses import dataclass

from noria.service.limits import MAX_CACHE_SALT_BYTES, MAX_CHOICES, MAX_PROMPT_LOGPROBS
from noria.service.trace import trace_id_of
from noria.v1 import common_pb2, worker_pb2
from worker.accounting import Work
from worker.engine_output import Account, Ended
from worker.sampling_checks import InvalidSubmitError, ModelLimits, check_ids, sampling_from
from worker.scheduled import SequenceUpdate
from worker.scores import PromptLogprobs
from worker.sequence import FinishReason, SampledToken, Sequence

FINISH_REASONS = {
    FinishReason.EOS: worker_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_ID: worker_pb2.FINISH_REASON_STOP_ID,
    FinishReason.LENGTH: worker_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: worker_pb2.FINISH_REASON_ABORTED,
    FinishReason.EXPIRED: worker_pb2.FINISH_REASON_EXPIRED,
}
# Why a choice ends while others of its submit may go on.
FINISHED_BY_ITSELF = (FinishReason.EOS, FinishReason.STOP_ID, FinishReason.LENGTH)


def sequence_from(
    submit: worker_pb2.Submit, limits: ModelLimits, sequence_id: int, now: float
) -> Sequence:
    """The sequence a submit asks for, with its siblings; they have the ids after its own.

    Raises InvalidSubmitError before anything is held.
    """
    # Lengths first: no list of millions of ids is copied or looked through.
    _check_lengths(submit, len(submit.prompt_token_ids), limits.max_model_len)
    prompt = list(submit.prompt_token_ids)
    check_ids("prompt_token_ids", prompt, limits.vocab_size)
    if len(submit.cache_salt) > MAX_CACHE_SALT_BYTES:
        raise InvalidSubmitError(
            "cache_salt", f"{len(submit.cache_salt)} bytes, at most {MAX_CACHE_SALT_BYTES}"
        )
    sampling = sampling_from(submit.sampling, limits)
    scores_prompt = sampling.prompt_logprobs is not None and not any(
        output.ids for output in submit.outputs
    )
    trace_id = trace_id_of(submit.traceparent)
    deadline = now + submit.deadline_ms / 1000 if submit.HasField("deadline_ms") else None

    def choice(index: int, siblings: Ids[Sequence] = ()) -> Sequence:
        output = list(submit.outputs[index].ids) if submit.outputs else []
        check_ids("outputs", output, limits.vocab_size)
        return Sequence(
            sequence_id=sequence_id + index,
            prompt_token_ids=prompt,
            output_token_ids=output,
            num_given_tokens=len(output),
            cache_salt=submit.cache_salt,
            sampling=sampling,
            max_tokens=submit.max_tokens,
            order=sequence_id + index,
            priority=submit.priority,
            choice=index,
            deadline=deadline,
            trace_steps=submit.trace_steps,
            trace_id=trace_id,
            siblings=siblings,
            scores_prompt=scores_prompt and index == 0,
        )

    return choice(0, [choice(index) for index in range(1, num_choices(submit))])


def num_choices(submit: worker_pb2.Submit) -> int:
    """How many answers are asked for."""
    return submit.n if submit.HasField("n") else 1


def _check_lengths(submit: worker_pb2.Submit, num_prompt: int, max_model_len: int) -> None:
    if not num_prompt:
        raise InvalidSubmitError("prompt_token_ids", "0 ids given, at least 1 needed")
    _check_choices(submit)
    if submit.max_tokens < 1:
        raise InvalidSubmitError("max_tokens", f"{submit.max_tokens} is below 1")
    longest = max((len(output.ids) for output in submit.outputs), default=0)
    if longest > submit.max_tokens:
        raise InvalidSubmitError(
            "outputs", f"{longest} ids are more than max_tokens {submit.max_tokens}"
        )
    if submit.sampling.min_tokens > submit.max_tokens:
        raise InvalidSubmitError(
            "sampling.min_tokens",
            f"{submit.sampling.min_tokens} is above max_tokens {submit.max_tokens}",
        )
    _check_prompt_logprobs(submit.sampling, num_prompt)
    if num_prompt + submit.max_tokens > max_model_len:
        raise InvalidSubmitError(
            "max_tokens",
            f"{num_prompt} prompt tokens and max_tokens {submit.max_tokens} exceed the "
            f"context of {max_model_len} tokens",
        )


def _check_prompt_logprobs(sampling: common_pb2.SamplingParams, num_prompt: int) -> None:
    each = 1 + sampling.prompt_logprobs
    if sampling.HasField("prompt_logprobs") and num_prompt * each > MAX_PROMPT_LOGPROBS:
        raise InvalidSubmitError(
            "sampling.prompt_logprobs",
            f"{num_prompt} prompt tokens, {each} told of for each; at most "
            f"{MAX_PROMPT_LOGPROBS} together",
        )


def _check_choices(submit: worker_pb2.Submit) -> None:
    choices, given = num_choices(submit), len(submit.outputs)
    if not 1 <= choices <= MAX_CHOICES:
        raise InvalidSubmitError("n", f"{choices} choices; at least 1, at most {MAX_CHOICES}")
    if given not in (0, choices):
        raise InvalidSubmitError("outputs", f"{given} given for n = {choices}")


def step_record(
    update: SequenceUpdate, step: "StepFacts", pieces: Ids[bytes]
) -> common_pb2.StepRecord:
    """The wire's record of what one step did to one traced sequence.

    `pieces` has the bytes of each id; a model may have more ids than its vocabulary.
    """
    record = common_pb2.StepRecord(
        step=step.number,
        batch_size=step.batch_size,
        batch_positions=step.num_positions,
        step_us=step.duration_us,
        hidden_size=step.origin.hidden_size,
        attention_backend=step.origin.attention_backend,
        row_exact=step.origin.row_exact,
        first_position=update.scheduled.first_position,
        num_positions=update.scheduled.num_tokens,
        kv_tokens=update.kv_tokens,
        kv_blocks=update.kv_blocks,
    )
    if update.token is not None:
        record.token_id = update.token.token_id
        record.token_bytes = _piece(pieces, update.token.token_id)
        record.probability = update.token.probability
        record.runners_up.extend(
            common_pb2.TokenProbability(
                id=token_id, bytes=_piece(pieces, token_id), probability=probability
            )
            for token_id, probability in update.token.runners_up
        )
    return record


def chosen_token(token: SampledToken) -> worker_pb2.ChosenToken:
    """A chosen id's log-probability, with its alternatives."""
    return worker_pb2.ChosenToken(
        logprob=token.logprob,
        alternatives=[
            common_pb2.TokenLogprob(id=token_id, logprob=logprob)
            for token_id, logprob in token.alternatives
        ],
    )


def prompt_logprobs(told: PromptLogprobs) -> worker_pb2.PromptLogprobs:
    """The next tokens of a prompt."""
    return worker_pb2.PromptLogprobs(
        logprobs=told.logprobs,
        num_alternatives=told.num_alternatives,
        alternative_ids=told.alternative_ids,
        alternative_logprobs=told.alternative_logprobs,
    )


def _piece(pieces: Ids[bytes], token_id: int) -> bytes:
    return pieces[token_id] if token_id < len(pieces) else b""


@dataclass(frozen=True, slots=True)
class Origin:
    """What all of a worker's steps have in common."""

    hidden_size: int
    attention_backend: str = ""
    row_exact: bool = False


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What all records of one step share."""

    number: int
    batch_size: int
    num_positions: int
    duration_us: int
    origin: Origin


def finished_from(choices: Ids[Ended]) -> worker_pb2.Finished:
    """The terminal entry of a submit whose choices have all ended, in their order.

    Its times are those of the whole: of the first step and the first token of any choice,
    and of the last choice's end.
    """
    sequences, account = [ended.sequence for ended in choices], _whole(choices)
    waiting, prefill, decode = durations_us(account)
    return worker_pb2.Finished(
        finish_reasons=[_finish_reason(sequence) for sequence in sequences],
        output_tokens=[len(sequence.output_token_ids) for sequence in sequences],
        prompt_tokens=len(sequences[0].prompt_token_ids),
        cached_tokens=sequences[0].num_cached_tokens,
        computed_tokens=account.computed_tokens,
        preemptions=sum(sequence.num_preemptions for sequence in sequences),
        waiting_us=waiting,
        prefill_us=prefill,
        decode_us=decode,
        device_us=account.device_us,
    )


def wire_work(work: Work) -> worker_pb2.Work:
    """What was computed for a submit that failed."""
    return worker_pb2.Work(
        prompt_tokens=work.prompt_tokens,
        cached_tokens=work.cached_tokens,
        output_tokens=work.generated_tokens,
        computed_tokens=work.computed_tokens,
        device_us=work.device_us,
    )


def _finish_reason(sequence: Sequence) -> worker_pb2.FinishReason.ValueType:
    if sequence.finish_reason is None:
        raise ValueError(f"sequence {sequence.sequence_id} has not ended")
    return FINISH_REASONS[sequence.finish_reason]


def _whole(choices: Ids[Ended]) -> Account:
    accounts = [ended.account for ended in choices]
    first_steps = [a.first_step for a in accounts if a.first_step is not None]
    first_tokens = [a.first_token for a in accounts if a.first_token is not None]
    return Account(
        arrived=accounts[0].arrived,
        first_step=min(first_steps, default=None),
        first_token=min(first_tokens, default=None),
        ended=max(account.ended for account in accounts),
        computed_tokens=sum(account.computed_tokens for account in accounts),
        device_us=sum(account.device_us for account in accounts),
    )


def durations_us(account: Account) -> tuple[int, int, int]:
    """Microseconds until the first step, from there to the first token, from there to the end.

    What has not come yet counts as nothing.
    """
    waiting, prefill, decode = _durations(account)
    return _us(waiting), _us(prefill), _us(decode)


def _durations(account: Account) -> tuple[float, float, float]:
    first_step = account.ended if account.first_step is None else account.first_step
    first_token = account.ended if account.first_token is None else account.first_token
    return first_step - account.arrived, first_token - first_step, account.ended - first_token


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
