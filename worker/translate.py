"""Between the wire's messages and the engine's own terms. Nothing is decided here but validity."""

from collections.abc import Sequence as Ids
from dataclasses import dataclass

from noria.service.limits import MAX_CACHE_SALT_BYTES
from noria.v1 import common_pb2, worker_pb2
from worker.engine import Account, Ended
from worker.sampling_checks import InvalidSubmitError, ModelLimits, check_ids, sampling_from
from worker.scheduler import SequenceUpdate
from worker.sequence import FinishReason, SampledToken, Sequence

FINISH_REASONS = {
    FinishReason.EOS: worker_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_ID: worker_pb2.FINISH_REASON_STOP_ID,
    FinishReason.LENGTH: worker_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: worker_pb2.FINISH_REASON_ABORTED,
    FinishReason.EXPIRED: worker_pb2.FINISH_REASON_EXPIRED,
}


def sequence_from(
    submit: worker_pb2.Submit, limits: ModelLimits, sequence_id: int, now: float
) -> Sequence:
    """The sequence a submit asks for. Raises InvalidSubmitError before anything is held."""
    if submit.n > 1:
        raise InvalidSubmitError("n", f"{submit.n} choices asked for, at most 1 is supported")
    # Lengths first: no list of millions of ids is copied or looked through.
    num_output = len(submit.outputs[0].ids) if submit.outputs else 0
    _check_lengths(submit, len(submit.prompt_token_ids), num_output, limits.max_model_len)
    prompt = list(submit.prompt_token_ids)
    output = list(submit.outputs[0].ids) if submit.outputs else []
    check_ids("prompt_token_ids", prompt, limits.vocab_size)
    check_ids("outputs", output, limits.vocab_size)
    if len(submit.cache_salt) > MAX_CACHE_SALT_BYTES:
        raise InvalidSubmitError(
            "cache_salt", f"{len(submit.cache_salt)} bytes, at most {MAX_CACHE_SALT_BYTES}"
        )
    deadline = now + submit.deadline_ms / 1000 if submit.HasField("deadline_ms") else None
    return Sequence(
        sequence_id=sequence_id,
        prompt_token_ids=prompt,
        output_token_ids=output,
        num_given_tokens=len(output),
        cache_salt=submit.cache_salt,
        sampling=sampling_from(submit.sampling, limits),
        max_tokens=submit.max_tokens,
        order=sequence_id,
        priority=submit.priority,
        deadline=deadline,
        trace_steps=submit.trace_steps,
    )


def _check_lengths(
    submit: worker_pb2.Submit, num_prompt: int, num_output: int, max_model_len: int
) -> None:
    if not num_prompt:
        raise InvalidSubmitError("prompt_token_ids", "0 ids given, at least 1 needed")
    if len(submit.outputs) > 1:
        raise InvalidSubmitError("outputs", f"{len(submit.outputs)} given for 1 choice")
    if submit.max_tokens < 1:
        raise InvalidSubmitError("max_tokens", f"{submit.max_tokens} is below 1")
    if num_output > submit.max_tokens:
        raise InvalidSubmitError(
            "outputs", f"{num_output} ids are more than max_tokens {submit.max_tokens}"
        )
    if submit.sampling.min_tokens > submit.max_tokens:
        raise InvalidSubmitError(
            "sampling.min_tokens",
            f"{submit.sampling.min_tokens} is above max_tokens {submit.max_tokens}",
        )
    if num_prompt + submit.max_tokens > max_model_len:
        raise InvalidSubmitError(
            "max_tokens",
            f"{num_prompt} prompt tokens and max_tokens {submit.max_tokens} exceed the "
            f"context of {max_model_len} tokens",
        )


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
        hidden_size=step.hidden_size,
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


def _piece(pieces: Ids[bytes], token_id: int) -> bytes:
    return pieces[token_id] if token_id < len(pieces) else b""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What all records of one step share."""

    number: int
    batch_size: int
    num_positions: int
    duration_us: int
    hidden_size: int


def finished_from(ended: Ended) -> worker_pb2.Finished:
    """The terminal entry of a sequence that was taken and has ended."""
    sequence, account = ended.sequence, ended.account
    reason = sequence.finish_reason
    if reason is None:
        raise ValueError(f"sequence {sequence.sequence_id} has not ended")
    waiting, prefill, decode = durations_us(account)
    return worker_pb2.Finished(
        finish_reasons=[FINISH_REASONS[reason]],
        output_tokens=[len(sequence.output_token_ids)],
        prompt_tokens=len(sequence.prompt_token_ids),
        cached_tokens=sequence.num_cached_tokens,
        computed_tokens=account.computed_tokens,
        preemptions=sequence.num_preemptions,
        waiting_us=waiting,
        prefill_us=prefill,
        decode_us=decode,
        device_us=_us(account.device_s),
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
