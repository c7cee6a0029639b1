"""Real models give transformers' logits from the same GGUF file, in fp32.

Within 1e-3 absolute and 1e-4 on average: a prompt at once, in chunks, and decoded.
"""

from dataclasses import dataclass

import pytest
import torch

from tests.support.tiny_models import Forward, scheduled
from worker.models.loader import open_checkpoint

BLOCK_SIZE = 16
pytestmark = [pytest.mark.soak, pytest.mark.model, pytest.mark.timeout(600)]


@dataclass
class Real:
    """A prompt, transformers' logits of it, and our model."""

    token_ids: list[int]
    expected: torch.Tensor
    model: object


def real(path, length):
    """transformers is released before our model is loaded."""
    from transformers import AutoModelForCausalLM, GgufConfig

    theirs = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()  # fmt: skip
    vocab_size = theirs.config.vocab_size
    token_ids = [(index * 7919 + 1013) % vocab_size for index in range(length)]
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    del theirs
    return Real(token_ids, expected, open_checkpoint(path).load())


@pytest.fixture(scope="module")
def smollm2(demo_model_path):
    return real(demo_model_path, 150)


@pytest.fixture(scope="module")
def gemma(gemma_model_path):
    """Longer than its sliding window of 512 tokens."""
    return real(gemma_model_path, 600)


def assert_same(real, sizes):
    """`sizes` of the chunks in which the prompt is computed; they add up to it."""
    assert sum(sizes) == len(real.token_ids)
    num_blocks = -(-len(real.token_ids) // BLOCK_SIZE)
    forward = Forward(real.model, num_blocks=num_blocks + 1, block_size=BLOCK_SIZE)
    first, blocks, worst, total = 0, list(range(num_blocks, 0, -1)), 0.0, 0.0
    for size in sizes:
        ids = real.token_ids[first : first + size]
        ours = forward.logits(scheduled(0, ids, first, blocks))
        difference = ours - real.expected[first : first + size]
        worst = max(worst, float(difference.abs().max()))
        total += float(difference.abs().double().sum())
        first += size
    mean = total / real.expected.numel()
    print(f"chunks of {sorted(set(sizes))}: {worst:.1e} at most, {mean:.1e} on average")
    assert worst < 1e-3
    assert mean < 1e-4
    assert real.expected.std() > 1


@pytest.mark.parametrize("sizes", [[150], [40, 40, 40, 30], [120, *[1] * 30]])
def test_smollm2(smollm2, sizes):
    assert_same(smollm2, sizes)


@pytest.mark.parametrize("sizes", [[600], [100] * 6, [540, *[1] * 60]])
def test_gemma3(gemma, sizes):
    assert_same(gemma, sizes)
