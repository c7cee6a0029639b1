"""When an output is complete."""

from worker.sequence import FinishReason, Sequence


def reason_to_end(sequence: Sequence, max_model_len: int) -> FinishReason | None:
    """Why a sequence has nothing left to do after its last output token; None if it has."""
    output = sequence.output_token_ids
    if not output:
        return None
    # A grammar allows EOS before `min_tokens` only where nothing else can follow.
    if sequence.sampling.grammar is not None and output[-1] in sequence.sampling.eos_token_ids:
        return FinishReason.EOS
    if len(output) > sequence.sampling.min_tokens:
        if output[-1] in sequence.sampling.eos_token_ids:
            return FinishReason.EOS
        if output[-1] in sequence.sampling.stop_token_ids:
            return FinishReason.STOP_ID
    if sequence.num_tokens >= max_model_len or len(output) >= sequence.max_tokens:
        return FinishReason.LENGTH
    return None
