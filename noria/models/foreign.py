"""Models that transformers' own code computes: what they may not ask of our attention."""

from collections.abc import Mapping
from typing import Any

from noria.models.config import ConfigError
from noria.models.fields import refuse_unless_neutral

# What our side would have to honour, with the values that switch it off. Everything else
# in a config is honoured by the model's own code.
_OURS: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "alibi": (False,),
    "use_alibi": (False,),
    "attention_chunk_size": (),
    "attn_logit_softcapping": (),
    "audio_config": (),
    "is_causal": (True,),
    "num_kv_shared_layers": (0,),
    "quantization_config": (),
    "text_config": (),
    "use_bidirectional_attention": (False,),
    "vision_config": (),
}
# Architectures that have ALiBi where their configs do not say otherwise.
_ALIBI = ("BloomForCausalLM", "MptForCausalLM")


def refuse_unpaged(where: str, architecture: str, values: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first field that asks for more than paged causal attention."""
    refuse_unless_neutral(where, {k: v for k, v in values.items() if k in _OURS}, _OURS)
    attention = values.get("attn_config")
    switched_off = isinstance(attention, Mapping) and attention.get("alibi") is False
    if architecture in _ALIBI and not switched_off:
        raise ConfigError(f"{where}: architectures = [{architecture!r}] has ALiBi: not supported")
