"""A tiny random model in every form a checkpoint comes in, from transformers' own hand."""

import json
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from worker.attention.torch_backend import TorchBackend
from worker.input_batch import build_input_batch
from worker.kv_cache import allocate_kv_cache
from worker.sequence import Draw, SamplingParams, ScheduledSequence, SchedulerOutput

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER, VOCAB = 96, 6, 2, 3, 160, 131
HEAD_DIM = 32


def tiny_llama(**settings) -> LlamaForCausalLM:
    """6 query heads on 2 KV heads of 32; weights large enough to make logits differ."""
    values = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": LAYERS,
        "intermediate_size": INNER, "max_position_embeddings": 512, "eos_token_id": 2,
        "rope_theta": 5000.0, "tie_word_embeddings": False, "initializer_range": 0.15,
    }  # fmt: skip
    return randomised(LlamaForCausalLM, LlamaConfig(**(values | settings)))


def randomised(kind: type[PreTrainedModel], config) -> PreTrainedModel:
    """With norms and biases that are not one and zero, so that leaving one out shows."""
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "ln_" in name or name.endswith("bias"):
                weight.add_(0.3 * torch.randn(weight.shape))
    return model


def edit_config(folder: Path, **changes) -> None:
    """Set fields of config.json; None removes one."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kinds: dict[str, GGMLQuantizationType] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
    **metadata,
) -> None:
    """The model as llama.cpp's converter lays it out; `kinds` quantises tensors by name.

    Names come from the gguf package. `metadata`, with __ for a dot, replaces and adds keys.
    """
    config, writer = model.config, GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(config.eos_token_id)
    for key, value in metadata.items():
        kinds_of = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        kinds_of[type(value)](f"{architecture}." + key.replace("__", "."), value)
    for name, tensor in _gguf_tensors(model, architecture).items():
        kind = (kinds or {}).get(name, GGMLQuantizationType.F32)
        if name not in drop:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """llama.cpp interleaves heads for "llama" alone and adds one to Gemma 3's norms."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.numpy()
        for projection, count in heads.items():
            if projection in name and architecture == "llama":
                values = interleaved(values, count)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return tensors


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i of a head and row i + d/2 become neighbours, as llama.cpp rotates them."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def scheduled(sequence_id, token_ids, first, blocks, **params):
    """One greedy entry of a step, drawing the first output token."""
    draw = Draw(SamplingParams(**({"temperature": 0.0} | params)), output_index=0)
    return ScheduledSequence(sequence_id, token_ids, first, blocks, draw)


def step(*entries):
    return SchedulerOutput(1, entries, sum(entry.num_tokens for entry in entries))


class Forward:
    """A model with its own cache: hidden states and logits of whole steps."""

    def __init__(self, model, num_blocks=64, block_size=4):
        self.model, self.block_size = model, block_size
        self.backend = TorchBackend()
        allocate_kv_cache(self.backend, model.kv_spec, num_blocks, block_size)

    def logits(self, *entries):
        """Logits of every position of the step, fp32 [T, vocab]."""
        with torch.inference_mode():
            return self.model.logits(self.hidden(*entries))

    def hidden(self, *entries):
        """Hidden states of every position of the step, [T, hidden_size]."""
        batch = build_input_batch(step(*entries), self.block_size)
        with torch.inference_mode():
            self.backend.plan(batch.metadata)
            return self.model.forward(batch.token_ids, batch.metadata.positions, self.backend)
