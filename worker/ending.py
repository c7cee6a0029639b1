"""When an output is complete."""

from worker.sequence import FinishReason, Sequence


def reason_to_end(sequence: Sequence, max_model_len: int) -> FinishReason | None:
    """Why a sequence has nothing left to do after its last output token; None if it has."""
    output = sequence.output_token_ids
    if not output:
        return None
    last, sampling = output[-1], sequence.sampling
    may_end = len(output) > sampling.min_tokens
    # A grammar allows EOS before `min_tokens` only where nothing else can follow.
    if last in sampling.eos_token_ids and (may_end or sampling.grammar is not None):
        return FinishReason.EOS
    if last in sampling.stop_token_ids and may_end:
        return FinishReason.STOP_ID
    if len(output) >= sequence.max_tokens or sequence.num_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None


def will_end(sequence: Sequence, max_model_len: int) -> bool:
    """Whether it ends with a token that is pending, whichever that is."""
    pending = sequence.num_pending_tokens
    if not pending:
        return False
    has_last = len(sequence.output_token_ids) + pending >= sequence.max_tokens
    return has_last or sequence.num_tokens + pending >= max_model_len
