"""Greedy ids equal those of transformers, in fp32 on the same weights, however they are batched.

The reference is transformers' own greedy generation with its KV cache, once per run, in
groups of similar length (the longest prompts alone). Where its two best logits lie within
1e-4 of each other either is right: such a place is printed and counted, and the sequence
continues from the reference's choice, so that every one of its 64 tokens is compared.
"""

from dataclasses import dataclass

import pytest
import torch

from tests.support.parity_chats import CHATS
from worker.attention.torch_backend import TorchBackend
from worker.block_pool import BlockPool
from worker.kv_cache import allocate_kv_cache
from worker.model_runner import ModelRunner
from worker.models.loader import open_checkpoint
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams, Sequence

NUM_OUTPUTS = 64
NEAR_TIE = 1e-4
NUM_BLOCKS, BLOCK_SIZE = 512, 16
# The shortest twelve chats, the next six, then one by one.
GROUPS = (12, 6, 1, 1)

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]


@dataclass
class Reference:
    """One chat: its prompt, transformers' ids, and by how much each was best."""

    prompt: list[int]
    output: list[int]
    gaps: list[float]


@pytest.fixture(scope="module")
def references(demo_model_path):
    """The 20 chats in order; transformers is released before anything else runs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, file = str(demo_model_path.parent), demo_model_path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()  # fmt: skip
    assert {(p.dtype, p.is_floating_point()) for p in model.parameters()} == {(torch.float32, True)}
    model.generation_config.eos_token_id = None
    prompts = [encode(tokenizer, chat) for chat in CHATS]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found = {}
    for size in GROUPS:
        group, order = order[:size], order[size:]
        found |= zip(group, generate(model, tokenizer, [prompts[i] for i in group]), strict=True)
    return [found[index] for index in range(len(prompts))]


def encode(tokenizer, chat):
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def generate(model, tokenizer, prompts):
    batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    with torch.inference_mode():
        generated = model.generate(
            **batch, max_new_tokens=NUM_OUTPUTS, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    best = torch.stack([logits.topk(2).values for logits in generated.logits], dim=1)
    gaps = (best[..., 0] - best[..., 1]).tolist()
    outputs = generated.sequences[:, batch["input_ids"].shape[1] :].tolist()
    assert all(len(output) == NUM_OUTPUTS for output in outputs)
    return [Reference(*one) for one in zip(prompts, outputs, gaps, strict=True)]


@pytest.fixture(scope="module")
def runner(demo_model_path, references):
    """Our model with its cache; built after the reference, so that one of them is in memory."""
    model, backend = open_checkpoint(demo_model_path).load(), TorchBackend()
    allocate_kv_cache(backend, model.kv_spec, NUM_BLOCKS + 1, BLOCK_SIZE)
    return ModelRunner(model, backend, BLOCK_SIZE)


def run(runner, starts, max_num_seqs, max_num_batched_tokens):
    """Outputs by chat; `starts` gives prompt and the output ids that are already known."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(
        pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=2048, enable_prefix_caching=False,
    )  # fmt: skip
    sequences = {
        index: Sequence(
            index, prompt, SamplingParams(temperature=0.0), NUM_OUTPUTS, index,
            output_token_ids=list(known),
        )
        for index, (prompt, known) in starts.items()
    }  # fmt: skip
    for sequence in sequences.values():
        scheduler.add(sequence)
    fed = runner.num_positions_fed
    while (output := scheduler.schedule()) is not None:
        scheduler.update(output, runner.execute(output))
    assert pool.num_used == 0
    computed = sum(sequence.num_tokens - 1 for sequence in sequences.values())
    assert runner.num_positions_fed - fed == computed
    return {index: sequence.output_token_ids for index, sequence in sequences.items()}


def divergence(reference, output):
    """The first index at which the ids differ, None if they do not."""
    pairs = enumerate(zip(reference.output, output, strict=True))
    return next((at for at, (theirs, ours) in pairs if theirs != ours), None)


def near_ties(references, compute):
    """Follow the references with `compute(starts)`; where ours chose the other of two equals.

    Fails at a divergence that is not one.
    """
    ties = []
    starts = {index: (reference.prompt, []) for index, reference in enumerate(references)}
    while starts:
        for index, output in compute(starts).items():
            reference = references[index]
            prompt, _ = starts.pop(index)
            at = divergence(reference, output)
            if at is None:
                continue
            gap = reference.gaps[at]
            assert gap <= NEAR_TIE, f"chat {index}, output {at}: the reference leads by {gap}"
            ties.append((index, at, gap))
            if at + 1 < NUM_OUTPUTS:
                starts[index] = (prompt, reference.output[: at + 1])
    return ties


def assert_parity(references, compute):
    ties = near_ties(references, compute)
    total = NUM_OUTPUTS * len(references)
    for index, at, gap in ties:
        print(f"chat {index}, output {at}: the reference's two best lie {gap:.1e} apart")
    print(f"{len(ties)} of {total} tokens at near ties")
    assert len(ties) <= total / 1000


def test_the_chats_are_what_is_claimed(references):
    """Twenty prompts of 15 to 1,500 tokens, and outputs that are not all alike."""
    lengths = sorted(len(reference.prompt) for reference in references)
    print(f"prompt tokens: {lengths}, {sum(lengths)} in all")
    assert len(lengths) == 20
    assert lengths[0] == 15
    assert 1400 <= lengths[-1] <= 1500
    assert len({tuple(reference.output) for reference in references}) == 20


def test_each_alone(references, runner):
    def compute(starts):
        alone = [run(runner, {index: start}, 1, 2048) for index, start in starts.items()]
        return {index: output for outputs in alone for index, output in outputs.items()}

    assert_parity(references, compute)


def test_all_in_one_batch(references, runner):
    """Every prompt in the first step, then 20 decodes per step."""
    assert_parity(references, lambda starts: run(runner, starts, 20, 8192))


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(16, 16), (64, 20), (512, 20)])
def test_in_chunks(references, runner, budget, max_num_seqs):
    """Prompts are cut by the step's budget and computed beside others' decodes."""
    assert_parity(references, lambda starts: run(runner, starts, max_num_seqs, budget))
