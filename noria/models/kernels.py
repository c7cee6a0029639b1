"""What the worker's own kernels for CPUs can compute, and what weights take there."""

import math

from noria.models.config import DecoderConfig, ModelConfig
from noria.models.family import Layout, Parameter

# Slots that share a record, and the multiple that head sizes are of; see
# worker/native/source/cache.h.
GROUP = 16
HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 32, 512
MAX_QUERIES_PER_KV_HEAD = 64
# Rows of a panel of weights, and the multiple that rows are filled up to; see linear.h.
LANES = 16
UNIT = 2 * LANES
FAMILIES = frozenset(("llama", "mistral", "qwen2", "qwen3"))
# Switches of DecoderConfig that the kernels do not know.
_UNKNOWN = ("attention_out_bias", "mlp_bias", "local_rope", "final_logit_softcap")


def reasons_against(
    config: ModelConfig, dtype: str = "auto", block_size: int | None = None
) -> list[str]:
    """Why the kernels cannot run this model with these settings; none if they can."""
    reasons = []
    if dtype not in ("auto", "bfloat16"):
        reasons.append(f"dtype {dtype} was asked for, its weights are bfloat16")
    if block_size is not None and block_size % GROUP:
        reasons.append(f"block_size {block_size} is no multiple of {GROUP}")
    if not isinstance(config, DecoderConfig):
        return [*reasons, "the model is computed by transformers' own code"]
    return reasons + _against_sizes(config)


def _against_sizes(config: DecoderConfig) -> list[str]:
    reasons = []
    if config.architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        reasons.append(f"architecture {config.architecture} is none of {known}")
    reasons += [f"the model has {name}" for name in _UNKNOWN if getattr(config, name)]
    multiples = {"hidden_size": UNIT, "intermediate_size": UNIT, "head_dim": HEAD_DIM_MULTIPLE}
    for name, multiple in multiples.items():
        if getattr(config, name) % multiple:
            reasons.append(f"{name} {getattr(config, name)} is no multiple of {multiple}")
    if config.head_dim > MAX_HEAD_DIM:
        reasons.append(f"head_dim {config.head_dim} is above {MAX_HEAD_DIM}")
    group = config.num_heads // config.num_kv_heads
    if group > MAX_QUERIES_PER_KV_HEAD:
        reasons.append(f"{group} query heads per KV head are above {MAX_QUERIES_PER_KV_HEAD}")
    return reasons


def packed_elements(n: int, k: int) -> int:
    """How many elements a weight [n, k] takes."""
    return -(-n // UNIT) * UNIT * k


def kernel_weight_bytes(config: DecoderConfig, layout: Layout) -> int:
    """Matrices packed in bf16, vectors in fp32; an untied embedding is only looked up."""
    looked_up = "" if config.tie_word_embeddings else "embedding"

    def size(parameter: Parameter) -> int:
        if len(parameter.shape) != 2:
            return 4 * parameter.size
        rows, columns = parameter.shape
        return 2 * (math.prod(parameter.shape) if parameter.name == looked_up
                    else packed_elements(rows, columns))  # fmt: skip

    return layout.sum(size)
