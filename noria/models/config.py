"""What a model is, whichever kind of file described it."""

import math
from dataclasses import dataclass, field, replace

from noria.models.rope import Rope, YarnScaling

_LARGEST = 1 << 40


class ConfigError(ValueError):
    """The model asks for something that is not honoured, or contradicts itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the engine has to know of any decoder-only transformer; counts.

    `architecture` chooses the family. `eos_token_ids` are all ids that end a turn.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name, 1)
            if value < 1:
                raise ConfigError(f"{name} is {value}; at least 1 is needed")
            if value > _LARGEST:
                raise ConfigError(f"{name} is {value}; at most {_LARGEST} can be")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        outside = [i for i in self.eos_token_ids if not 0 <= i < self.vocab_size]
        if outside:
            raise ConfigError(f"EOS id {outside[0]} lies outside vocab_size {self.vocab_size}")

    def check_num_layers(self, num_tensors: int) -> None:
        """Raises ConfigError for more layers than the checkpoint has tensors.

        It costs nothing, unlike a list of the tensors that so many layers would have.
        """
        if self.num_layers > num_tensors:
            raise ConfigError(
                f"num_layers is {self.num_layers}, but the checkpoint has {num_tensors} tensors"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Sizes and switches of the families built here: RMSNorm, rotary embedding, gated MLP.

    `sliding_window` (tokens, None: all of them) holds in every layer but `full_layers`;
    `local_rope`, where it is given, turns those same layers instead of `rope`.
    `query_scalar` replaces head_dim in the scale of attention scores, 1 / sqrt(it).
    Logits beyond `final_logit_softcap` are bent: cap * tanh(logits / cap).
    """

    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: Rope = field(default_factory=Rope)
    local_rope: Rope | None = None
    sliding_window: int | None = None
    full_layers: range | frozenset[int] = range(0)
    query_scalar: float | None = None
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    final_logit_softcap: float | None = None

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        thetas = [rope.theta for rope in (self.rope, self.local_rope) if rope is not None]
        if not all(theta > 0 for theta in thetas) or not self.rms_norm_eps > 0:
            raise ConfigError(
                f"rope_theta {min(thetas)} and rms_norm_eps {self.rms_norm_eps} must be above 0"
            )
        for name in ("sliding_window", "query_scalar", "final_logit_softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be above 0")

    @property
    def attention_scale(self) -> float:
        """By what attention scores are multiplied."""
        scalar = self.head_dim if self.query_scalar is None else self.query_scalar
        return 1.0 / math.sqrt(scalar)

    def window_of(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.sliding_window

    def turned_by(self, rope: Rope) -> "DecoderConfig":
        """With that rope, and the positions that YaRN stretches it for."""
        if not isinstance(rope.scaling, YarnScaling):
            return replace(self, rope=rope)
        stretched = int(min(rope.scaling.factor * rope.scaling.original_length, _LARGEST))
        longest = max(self.max_position_embeddings, stretched)
        return replace(self, rope=rope, max_position_embeddings=longest)

    def rope_of(self, layer: int) -> Rope:
        local = self.window_of(layer) is not None and self.local_rope is not None
        return self.local_rope if local and self.local_rope is not None else self.rope


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)
