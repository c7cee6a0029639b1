"""A Hugging Face folder's `config.json` and `generation_config.json` as a ModelConfig."""

import json
from pathlib import Path
from typing import Any

from worker.models.config import ConfigError, Fields, ModelConfig, refuse_unless_neutral

_HONOURED = frozenset(
    (
        "model_type",
        "architectures",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "rms_norm_eps",
        "rope_theta",
        "rope_parameters",
        "max_position_embeddings",
        "tie_word_embeddings",
        "eos_token_id",
    )
)
# Of training, of other programs, or of the tokenizer: none changes what is computed here.
_HARMLESS = frozenset(
    (
        "torch_dtype",
        "dtype",
        "transformers_version",
        "transformers.js_config",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "bos_token_id",
        "pad_token_id",
        "unk_token_id",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "is_llama_config",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "problem_type",
        "task_specific_params",
    )
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_scaling": ({"type": "default"}, {"rope_type": "default"}),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1.0,),
    "use_sliding_window": (False,),
    "pretraining_tp": (1,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
}
_ARCHITECTURES = {"LlamaForCausalLM": "llama"}


def read_hf_config(folder: Path) -> ModelConfig:
    """Raises ConfigError naming the file and the field, OSError if config.json is absent."""
    where = str(folder / "config.json")
    values = _read_object(folder / "config.json")
    fields = Fields(where, values)
    architecture = _architecture(where, values)
    refuse_unless_neutral(where, _unhonoured(values), _NEUTRAL)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // max(num_heads, 1)),
        intermediate_size=fields.integer("intermediate_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(where, values),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        eos_token_ids=_eos_token_ids(folder, fields),
    )


def _unhonoured(values: dict[str, Any]) -> dict[str, Any]:
    known = _HONOURED | _HARMLESS
    return {k: v for k, v in values.items() if k not in known and not k.startswith("_")}


def _architecture(where: str, values: dict[str, Any]) -> str:
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ConfigError(f"{where}: architectures = {names!r} is not supported ({supported} is)")
    return _ARCHITECTURES[names[0]]


def _rope_theta(where: str, values: dict[str, Any]) -> float:
    """From `rope_parameters` (transformers 5) or `rope_theta` (before)."""
    parameters = values.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise ConfigError(f"{where}: rope_parameters is {parameters!r}; an object is needed")
    others = {f"rope_parameters.{k}": v for k, v in parameters.items() if k != "rope_theta"}
    neutral = {
        "rope_parameters.rope_type": ("default",),
        "rope_parameters.partial_rotary_factor": (1.0,),
    }
    refuse_unless_neutral(where, others, neutral)
    source = parameters if "rope_theta" in parameters else values
    return Fields(where, source).number("rope_theta", 10000.0)


def _eos_token_ids(folder: Path, fields: Fields) -> frozenset[int]:
    """generation_config.json says which ids end a turn; config.json where it is silent."""
    path = folder / "generation_config.json"
    if path.exists():
        ids = Fields(str(path), _read_object(path)).ids("eos_token_id")
        if ids:
            return ids
    return fields.ids("eos_token_id")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return values
