"""Where two choices are equally right: rounding alone decides between them."""

import torch

from tests.support.tiny_models import Forward, scheduled
from worker.sampler import sample
from worker.sequence import Draw, Sequence

NOISE = 1e-4
TRIES = 64


def choices_within_noise(model, sequence: Sequence, at: int) -> set[int]:
    """Ids that the sequence's draw of output index `at` gives with logits up to 1e-4 off.

    The logits are computed anew, all positions at once. Where two logits are nearly equal, a
    filter's limit is near, or the draw's number is near an edge of the cumulative
    distribution, there are several.
    """
    output = sequence.output_token_ids[:at]
    history = [*sequence.prompt_token_ids, *output]
    fresh = Sequence(
        0, sequence.prompt_token_ids, sequence.sampling, sequence.max_tokens, 0,
        output_token_ids=output,
    )  # fmt: skip
    draw = Draw(sequence.sampling, at, sequence.choice, token_counts=fresh.token_counts)
    num_blocks = -(-len(history) // 4)
    forward = Forward(model, num_blocks=num_blocks + 1)
    whole = scheduled(0, history, 0, list(range(1, num_blocks + 1)))
    logits = forward.logits(whole)[-1]
    noise = torch.empty(TRIES, logits.shape[-1]).uniform_(-NOISE, NOISE)
    noise[0] = 0
    tokens = sample(logits + noise, [draw] * TRIES)
    return {token.token_id for token in tokens}
