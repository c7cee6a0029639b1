"""GPT-2 and OPT: decoders with LayerNorm, learned positions and a plain MLP.

transformers' own code computes them; here are their sizes and tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from noria.models.config import ConfigError, ModelConfig
from noria.models.family import Layout, Parameter, Part
from noria.models.fields import Fields
from noria.models.hf_config import hf_eos_token_ids

# OPT's position embedding has two rows before that of the first position.
_OPT_OFFSET = 2
# Both defaults and further names are those of transformers' classes.
_GPT2_DEFAULTS = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "eos_token_id": 50256,
}  # fmt: skip
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_OPT_DEFAULTS = {
    "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
    "max_position_embeddings": 2048, "num_attention_heads": 12, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainConfig(ModelConfig):
    """Sizes of GPT-2 or OPT; all heads have keys and values of their own."""

    intermediate_size: int


PlainReader = Callable[[str, Path, Mapping[str, Any]], tuple[PlainConfig, Layout]]


def _gpt2(where: str, path: Path, raw: Mapping[str, Any]) -> tuple[PlainConfig, Layout]:
    fields = Fields(where, {**_GPT2_DEFAULTS, **{_GPT2_NAMES.get(k, k): raw[k] for k in raw}})
    names = ("n_embd", "n_layer", "n_head", "n_positions")
    config = _config("gpt2", path, fields, names, ("n_inner", 4))
    hidden = config.hidden_size
    before = (
        _tensor("embedding", "transformer.wte.weight", config.vocab_size, hidden),
        _tensor("positions", "transformer.wpe.weight", config.max_position_embeddings, hidden),
    )
    after = (*_norm("transformer.ln_f", hidden), *_head(fields, config.vocab_size, hidden))
    layer = partial(_gpt2_layer, hidden, config.intermediate_size)
    return config, Layout(before, layer, config.num_layers, after)


def _gpt2_layer(hidden: int, inner: int, index: int) -> tuple[Parameter, ...]:
    """Its matrices are [inputs, outputs]."""
    here = f"transformer.h.{index}"
    return (
        *_norm(f"{here}.ln_1", hidden),
        *_linear(f"{here}.attn.c_attn", (hidden, 3 * hidden), 3 * hidden),
        *_linear(f"{here}.attn.c_proj", (hidden, hidden), hidden),
        *_norm(f"{here}.ln_2", hidden),
        *_linear(f"{here}.mlp.c_fc", (hidden, inner), inner),
        *_linear(f"{here}.mlp.c_proj", (inner, hidden), hidden),
    )


def _opt(where: str, path: Path, raw: Mapping[str, Any]) -> tuple[PlainConfig, Layout]:
    fields = Fields(where, {**_OPT_DEFAULTS, **raw})
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    config = _config("opt", path, fields, names, ("ffn_dim", 4))
    hidden, rows = config.hidden_size, config.max_position_embeddings + _OPT_OFFSET
    width, body = fields.integer("word_embed_proj_dim", hidden), "model.decoder"
    affine = fields.boolean("layer_norm_elementwise_affine", True)
    before = (
        _tensor("embedding", f"{body}.embed_tokens.weight", config.vocab_size, width),
        _tensor("positions", f"{body}.embed_positions.weight", rows, hidden),
    )
    first, removed = (
        fields.boolean("do_layer_norm_before", True),
        fields.boolean("_remove_final_layer_norm", False),
    )
    norm = _norm(f"{body}.final_layer_norm", hidden, affine) if first and not removed else []
    projections = () if width == hidden else (
        _tensor("projection in", f"{body}.project_in.weight", hidden, width),
        _tensor("projection out", f"{body}.project_out.weight", width, hidden),
    )  # fmt: skip
    after = (*norm, *projections, *_head(fields, config.vocab_size, width))
    bias = fields.boolean("enable_bias", True)
    layer = partial(_opt_layer, hidden, config.intermediate_size, bias, affine)
    return config, Layout(before, layer, config.num_layers, after)


def _opt_layer(
    hidden: int, inner: int, bias: bool, affine: bool, index: int
) -> tuple[Parameter, ...]:
    """Its matrices are [outputs, inputs]."""
    here = f"model.decoder.layers.{index}"
    projections = ("k_proj", "v_proj", "q_proj", "out_proj")
    attention = [
        _linear(f"{here}.self_attn.{name}", (hidden, hidden), hidden, bias) for name in projections
    ]
    return (
        *chain.from_iterable(attention),
        *_norm(f"{here}.self_attn_layer_norm", hidden, affine),
        *_linear(f"{here}.fc1", (inner, hidden), inner, bias),
        *_linear(f"{here}.fc2", (hidden, inner), hidden, bias),
        *_norm(f"{here}.final_layer_norm", hidden, affine),
    )


PLAIN: Mapping[str, PlainReader] = {"GPT2LMHeadModel": _gpt2, "OPTForCausalLM": _opt}


def _config(
    architecture: str,
    path: Path,
    fields: Fields,
    names: tuple[str, str, str, str],
    inner: tuple[str, int],
) -> PlainConfig:
    """`names` of the hidden size, the layers, the heads and the positions.

    `inner`: the name of the MLP's size, and of how many hidden sizes it is if it is null.
    """
    hidden, layers, heads, positions = (fields.integer(name) for name in names)
    if heads > 0 and hidden % heads:
        raise ConfigError(f"{fields.where}: {names[0]} {hidden} is no multiple of {heads} heads")
    return PlainConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // max(heads, 1),
        intermediate_size=fields.integer(inner[0], inner[1] * hidden),
        max_position_embeddings=positions,
        eos_token_ids=hf_eos_token_ids(path, fields),
    )


def _tensor(name: str, module: str, *shape: int) -> Parameter:
    return Parameter(name, (Part(module, shape),))


def _linear(
    module: str, shape: tuple[int, int], outputs: int, bias: bool = True
) -> list[Parameter]:
    weight = _tensor(module, f"{module}.weight", *shape)
    return [weight, *([_tensor(module, f"{module}.bias", outputs)] if bias else [])]


def _norm(module: str, size: int, affine: bool = True) -> list[Parameter]:
    return [_tensor("norm", f"{module}.{kind}", size) for kind in ("weight", "bias") if affine]


def _head(fields: Fields, rows: int, size: int) -> list[Parameter]:
    tied = fields.boolean("tie_word_embeddings", True)
    return [] if tied else [_tensor("head", "lm_head.weight", rows, size)]
