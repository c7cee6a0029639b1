"""The Mistral family (Jiang et al. 2023): Llama's layers, every one within a sliding window."""

from dataclasses import replace

from noria.models.config import DecoderConfig
from noria.models.family import HFFormat, ModelFamily
from noria.models.fields import Fields
from noria.models.hf_fields import ROPE_FIELDS, hf_rope
from noria.models.llama import LLAMA
from noria.models.tensors import decoder_layout


def _refine_hf(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    config = config.turned_by(hf_rope(fields, config.max_position_embeddings))
    return replace(config, sliding_window=fields.optional_integer("sliding_window"))


# llama.cpp calls Mistral's files "llama" too: they are read as such.
MISTRAL = ModelFamily(
    layout=decoder_layout,
    hf=HFFormat(
        _refine_hf,
        honoured=frozenset(("sliding_window",)) | ROPE_FIELDS,
        neutral={"hidden_act": ("silu",), "attention_bias": (False,)},
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    gguf=LLAMA.gguf,
)
