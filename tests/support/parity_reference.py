"""What transformers says to twenty chats, recorded once: its own greedy generation in fp32.

    python -m tests.support.parity_reference

writes the record anew. The soak form of the parity test computes it again and compares.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.support.parity_chats import CHATS

NUM_OUTPUTS = 64
RECORD = Path(__file__).parent.parent / "fixtures" / "parity" / "references.json"
# The shortest twelve chats, the next six, then one by one: little padding, little memory.
GROUPS = (12, 6, 1, 1)


@dataclass
class Reference:
    """One chat: its prompt, transformers' ids, and by how much the logit of each was best."""

    prompt: list[int]
    output: list[int]
    gaps: list[float]


def recorded(model_path: Path) -> list[Reference]:
    """The chats in order. Raises ValueError if the record is of other weights or chats."""
    record = json.loads(RECORD.read_text())
    if record["of"] != _origin(model_path):
        raise ValueError(f"{RECORD.name} is of other weights or other chats; record it anew")
    return [Reference(**reference) for reference in record["references"]]


def computed(model_path: Path) -> list[Reference]:
    """The chats in order; transformers is released when this returns."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, file = str(model_path.parent), model_path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()  # fmt: skip
    assert {(p.dtype, p.is_floating_point()) for p in model.parameters()} == {(torch.float32, True)}
    model.generation_config.eos_token_id = None
    prompts = [_encode(tokenizer, chat) for chat in CHATS]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found = {}
    for size in GROUPS:
        group, order = order[:size], order[size:]
        found |= zip(group, _generate(model, tokenizer, [prompts[i] for i in group]), strict=True)
    return [found[index] for index in range(len(prompts))]


def record(model_path: Path) -> None:
    references = [asdict(reference) for reference in computed(model_path)]
    RECORD.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(reference) for reference in references)
    origin = json.dumps(_origin(model_path))
    RECORD.write_text(f'{{"of": {origin},\n"references": [\n{lines}\n]}}\n')


def _origin(model_path: Path) -> dict[str, str]:
    chats = json.dumps(CHATS, ensure_ascii=False).encode()
    with model_path.open("rb") as file:
        weights = hashlib.file_digest(file, "sha256").hexdigest()
    return {"weights": weights, "chats": hashlib.sha256(chats).hexdigest()}


def _encode(tokenizer, chat):
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _generate(model, tokenizer, prompts):
    batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    with torch.inference_mode():
        generated = model.generate(
            **batch, max_new_tokens=NUM_OUTPUTS, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    best = torch.stack([logits.topk(2).values for logits in generated.logits], dim=1)
    gaps = [[float(f"{gap:.3g}") for gap in row] for row in (best[..., 0] - best[..., 1]).tolist()]
    outputs = generated.sequences[:, batch["input_ids"].shape[1] :].tolist()
    assert all(len(output) == NUM_OUTPUTS for output in outputs)
    return [Reference(*one) for one in zip(prompts, outputs, gaps, strict=True)]


if __name__ == "__main__":
    from tests.conftest import DEMO_MODEL

    record(DEMO_MODEL)
