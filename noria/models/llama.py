"""What Llama and its relatives (Touvron et al. 2023) are made of."""

from dataclasses import replace

from noria.models.config import DecoderConfig
from noria.models.family import GGUFFormat, GGUFTensor, HFFormat, ModelFamily
from noria.models.fields import Fields
from noria.models.gguf_rope import ROPE_KEYS, gguf_rope
from noria.models.hf_fields import ROPE_FIELDS, hf_rope
from noria.models.tensors import decoder_layout, gguf_names
from noria.service.gguf_file import GGUFFile


def _refine_hf(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    bias = fields.boolean("attention_bias", False)
    return replace(
        config.turned_by(hf_rope(fields, config.max_position_embeddings)),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def _refine_gguf(config: DecoderConfig, fields: Fields, file: GGUFFile) -> DecoderConfig:
    return replace(
        config.turned_by(gguf_rope(fields, file, config)),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


_plain_name = gguf_names()


def llama_gguf_tensor(name: str, config: DecoderConfig) -> GGUFTensor:
    """llama.cpp rotates neighbouring rows of this architecture alone. Raises KeyError."""
    heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}
    interleaved = next((count for module, count in heads.items() if module in name), 0)
    return replace(_plain_name(name, config), interleaved_heads=interleaved)


LLAMA = ModelFamily(
    layout=decoder_layout,
    hf=HFFormat(
        _refine_hf,
        honoured=frozenset(("attention_bias", "mlp_bias")) | ROPE_FIELDS,
        neutral={"hidden_act": ("silu",)},
    ),
    gguf=GGUFFormat(llama_gguf_tensor, _refine_gguf, honoured=ROPE_KEYS),
)
