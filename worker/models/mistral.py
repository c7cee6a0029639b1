"""The Mistral family (Jiang et al. 2023): Llama's layers, every one within a sliding window."""

from dataclasses import replace

from worker.models.base import HFFormat, ModelFamily
from worker.models.config import DecoderConfig
from worker.models.fields import Fields
from worker.models.hf_fields import ROPE_FIELDS, hf_rope
from worker.models.llama import LLAMA, build_pre_norm
from worker.models.tensors import decoder_parameters


def _refine_hf(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    rope = hf_rope(fields, config.max_position_embeddings)
    return replace(config, rope=rope, sliding_window=fields.optional_integer("sliding_window"))


# llama.cpp calls Mistral's files "llama" too: they are read as such.
MISTRAL = ModelFamily(
    parameters=decoder_parameters,
    build=build_pre_norm,
    hf=HFFormat(
        _refine_hf,
        honoured=frozenset(("sliding_window",)) | ROPE_FIELDS,
        neutral={"hidden_act": ("silu",), "attention_bias": (False,)},
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    gguf=LLAMA.gguf,
)
