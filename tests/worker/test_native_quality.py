"""What bf16 costs on real weights: no more than in transformers' own bf16, against its fp32.

Teacher-forced over the same ids. KL is that of the next token's distribution, fp32 to bf16,
in nats, averaged over positions.
"""

from dataclasses import dataclass

import pytest
import torch

from tests.support.native import VARIANT_NAMES, NativeForward, native_decoder
from tests.support.parity_chats import CHATS
from tests.support.tiny_models import scheduled
from worker.models.loader import open_checkpoint

pytestmark = [pytest.mark.model, pytest.mark.soak, pytest.mark.timeout(600)]

NUM_PROMPT, NUM_OUTPUTS = 128, 96
# By how many logits the reference may lead where bf16 chooses another token.
NEAR_TIE = 0.75


@dataclass
class Quality:
    mean_kl: float
    agreement: float
    max_difference: float


@dataclass
class Reference:
    """transformers' greedy continuation of a chat in fp32, its logits, and bf16's on the same."""

    ids: list[int]
    logits: torch.Tensor
    in_bf16: torch.Tensor


def transformers_model(path, dtype):
    from transformers import AutoModelForCausalLM, GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def reference(demo_model_path):
    from transformers import AutoTokenizer

    folder, file = str(demo_model_path.parent), demo_model_path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    chats = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in CHATS[:6]]
    prompt = tokenizer("".join(chats), add_special_tokens=False)["input_ids"][:NUM_PROMPT]
    model = transformers_model(demo_model_path, torch.float32)
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_OUTPUTS, do_sample=False, pad_token_id=0
        )
        logits = model(ids).logits[0]
        in_bf16 = model.to(torch.bfloat16)(ids).logits[0].float()
    return Reference(ids[0].tolist(), logits, in_bf16)


def quality(reference, logits):
    exact, ours = reference.logits.log_softmax(-1), logits.log_softmax(-1)
    kl = (exact.exp() * (exact - ours)).sum(-1).mean()
    agreement = (exact.argmax(-1) == ours.argmax(-1)).float().mean()
    return Quality(kl.item(), agreement.item(), (reference.logits - logits).abs().max().item())


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_the_kernels_lose_no_more_than_transformers_in_bf16(demo_model_path, reference, variant):
    forward = NativeForward(native_decoder(open_checkpoint(demo_model_path), variant))
    ours = forward.logits(scheduled(0, reference.ids, 0, list(range(1, 30))))
    found, theirs = quality(reference, ours), quality(reference, reference.in_bf16)
    assert theirs.mean_kl > 0
    assert found.mean_kl <= theirs.mean_kl
    chosen, best = ours.argmax(-1), reference.logits.max(-1).values
    leads = best - reference.logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
    print(f"{variant}: {found}; transformers in bfloat16: {theirs}; worst lead {leads.max():.3f}")
    assert leads.max() <= NEAR_TIE
