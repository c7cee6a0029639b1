"""A Hugging Face folder's `config.json` and `generation_config.json` as a ModelConfig."""

import json
from pathlib import Path
from typing import Any

from noria.models.config import ConfigError, DecoderConfig
from noria.models.family import HFFormat
from noria.models.fields import Fields, refuse_unless_neutral
from noria.models.registry import HF_ARCHITECTURES, family_of

_MAX_CONFIG_BYTES = 16 << 20
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
        "cache_implementation",
        "task_specific_params",
        "unsloth_fixed",
        "unsloth_version",
        # Of how transformers was run when it wrote the file.
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_auto_class",
        "_commit_hash",
        "_experts_implementation",
        "_flash_attn_2_enabled",
        "_from_auto",
        "_from_pipeline",
        "_name_or_path",
    )
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mlp_bias": (False,),
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


def config_file(path: Path) -> Path:
    """Of a folder its config.json; a file is one itself."""
    return path / "config.json" if path.is_dir() else path


def read_hf_config(path: Path) -> DecoderConfig:
    """The config of a family built here: a folder, or a config.json alone.

    Raises ConfigError naming the file and the field, OSError if it is absent.
    """
    where, raw = str(config_file(path)), read_object(config_file(path))
    architecture = _architecture(where, raw)
    form = family_of(architecture).hf
    values = {**form.defaults, **raw}
    refuse_unless_neutral(where, _unhonoured(raw, form), {**_NEUTRAL, **form.neutral})
    fields = Fields(where, values)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    config = DecoderConfig(
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
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        eos_token_ids=hf_eos_token_ids(path, fields),
    )
    return form.refine(config, fields)


def _unhonoured(values: dict[str, Any], form: HFFormat) -> dict[str, Any]:
    known = _HONOURED | _HARMLESS | form.honoured
    return {k: v for k, v in values.items() if k not in known}


def _architecture(where: str, values: dict[str, Any]) -> str:
    name = hf_architecture(where, values)
    if name not in HF_ARCHITECTURES:
        supported = ", ".join(HF_ARCHITECTURES)
        raise ConfigError(f"{where}: architectures = [{name!r}] is not supported ({supported} are)")
    return HF_ARCHITECTURES[name]


def hf_architecture(where: str, values: dict[str, Any]) -> str:
    """The one name in `architectures`. Raises ConfigError."""
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"{where}: architectures is {names!r}; a list of one name is needed")
    return names[0]


def hf_eos_token_ids(path: Path, fields: Fields) -> frozenset[int]:
    """generation_config.json says which ids end a turn; config.json where it is silent."""
    generation = path / "generation_config.json"
    if generation.exists():
        ids = Fields(str(generation), read_object(generation)).ids("eos_token_id")
        if ids:
            return ids
    return fields.ids("eos_token_id")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises ConfigError, OSError."""
    size = path.stat().st_size
    if size > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: {size} bytes; a config has at most {_MAX_CONFIG_BYTES}")
    try:
        values = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return values
