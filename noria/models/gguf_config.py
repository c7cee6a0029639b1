"""A GGUF file's metadata as a ModelConfig."""

from typing import Any

from noria.models.config import ConfigError, DecoderConfig
from noria.models.fields import Fields, refuse_unless_neutral
from noria.models.registry import GGUF_ARCHITECTURES, family_of
from noria.service.gguf_file import GGUFFile

_HONOURED = frozenset(
    (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
    )
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.finetuned": (False,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("Meta AI original pth", "reference"),
}
# End of sequence, of turn, of message: whichever the file names ends the answer.
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


def read_gguf_config(file: GGUFFile) -> DecoderConfig:
    """Raises ConfigError naming the file and the field."""
    where = str(file.path)
    architecture = file.metadata["general.architecture"]
    if architecture not in GGUF_ARCHITECTURES:
        supported = ", ".join(GGUF_ARCHITECTURES)
        raise ConfigError(
            f"{where}: general.architecture = {architecture!r} is not supported ({supported} are)"
        )
    form = family_of(architecture).gguf
    values = _architecture_values(file, architecture)
    refuse_unless_neutral(
        where,
        {f"{architecture}.{k}": v for k, v in values.items() if k not in _HONOURED | form.honoured},
        {f"{architecture}.{k}": v for k, v in _NEUTRAL.items()},
    )
    fields = Fields(f"{where}: {architecture}", values)
    hidden_size, num_heads = (
        fields.integer("embedding_length"),
        fields.integer("attention.head_count"),
    )
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", _embedding_rows(file)),
        hidden_size=hidden_size,
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=fields.integer("attention.key_length", hidden_size // max(num_heads, 1)),
        intermediate_size=fields.integer("feed_forward_length"),
        max_position_embeddings=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings=_OUTPUT not in file.tensors,
        eos_token_ids=_eos_token_ids(file),
    )
    _check_head_sizes(where, fields, config.head_dim)
    return form.refine(config, fields, file)


def _architecture_values(file: GGUFFile, architecture: str) -> dict[str, Any]:
    prefix = f"{architecture}."
    return {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}


def _embedding_rows(file: GGUFFile) -> int | None:
    info = file.tensors.get(_EMBEDDING)
    return info.shape[0] if info is not None and info.shape else None


def _eos_token_ids(file: GGUFFile) -> frozenset[int]:
    fields = Fields(str(file.path), file.metadata)
    return frozenset().union(*(fields.ids(f"tokenizer.ggml.{key}") for key in _EOS_KEYS))


def _check_head_sizes(where: str, fields: Fields, head_dim: int) -> None:
    for name in ("attention.value_length", "rope.dimension_count"):
        size = fields.integer(name, head_dim)
        if size != head_dim:
            raise ConfigError(f"{where}: {name} = {size} differs from the head size {head_dim}")
