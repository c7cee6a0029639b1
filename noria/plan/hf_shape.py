"""A Hugging Face config.json as a ModelShape."""

from collections.abc import Callable
from pathlib import Path

from noria.plan.kv import DTYPE_BYTES
from noria.plan.parameters import GatedSizes, PlainSizes, gated_parameters, plain_parameters
from noria.plan.shape import ModelShape, ShapeError, Values, read_json

# OPT's position embedding has two rows before that of the first position.
_OPT_OFFSET = 2
_GEMMA3_PATTERN = 6
_QWEN_WINDOW_LAYERS = 28


def hf_shape(path: Path) -> ModelShape:
    """`path` is a config.json or the folder that holds one.

    Defaults are those of `transformers`. Raises ShapeError naming the field, OSError.
    """
    values = read_json(path / "config.json" if path.is_dir() else path)
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in _READERS:
        known = ", ".join(_READERS)
        raise ShapeError(
            f"{values.where}: architectures = {str(names)[:80]} is not known (known: {known})"
        )
    return _READERS[name](values)


def _llama(values: Values) -> ModelShape:
    bias = values.flag("attention_bias", False)
    mlp_bias = values.flag("mlp_bias", False)
    return _gated(values, "llama", q_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def _mistral(values: Values) -> ModelShape:
    window = values.count("sliding_window") if values.get("sliding_window") else None
    return _gated(values, "mistral", window=window, windowed=_everywhere(values, window))


def _qwen2(values: Values) -> ModelShape:
    window, windowed = _qwen_window(values)
    return _gated(values, "qwen2", q_bias=True, window=window, windowed=windowed)


def _qwen3(values: Values) -> ModelShape:
    window, windowed = _qwen_window(values)
    bias = values.flag("attention_bias", False)
    return _gated(
        *(values, "qwen3"), q_bias=bias, out_bias=bias, qk_norm=True, head_dim=128,
        window=window, windowed=windowed,
    )  # fmt: skip


def _gemma3(values: Values) -> ModelShape:
    window = values.count("sliding_window", 4096)
    layers = values.count("num_hidden_layers")
    pattern = _GEMMA3_PATTERN
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        if values.get(name) is not None:
            pattern = values.count(name)
    bias = values.flag("attention_bias", False)
    return _gated(
        *(values, "gemma3"), q_bias=bias, out_bias=bias, qk_norm=True, head_dim=256, num_norms=4,
        num_kv_heads=4, tied=True, window=window,
        windowed=_listed_windows(values, layers - layers // pattern),
    )  # fmt: skip


def _gpt2(values: Values) -> ModelShape:
    hidden, heads, layers = (values.count(name) for name in ("n_embd", "n_head", "n_layer"))
    inner, positions = values.count("n_inner", 4 * hidden), values.count("n_positions")
    if values.flag("add_cross_attention", False):
        raise ShapeError(f"{values.where}: add_cross_attention is true; a decoder alone is needed")
    vocab_size, tied = values.count("vocab_size"), values.flag("tie_word_embeddings", True)
    sizes = PlainSizes(vocab_size, hidden, hidden, inner, layers, positions, tied)
    return _plain(values, "gpt2", sizes, heads, positions)


def _opt(values: Values) -> ModelShape:
    hidden = values.count("hidden_size")
    positions = values.count("max_position_embeddings")
    norm_first = values.flag("do_layer_norm_before", True)
    sizes = PlainSizes(
        vocab_size=values.count("vocab_size"),
        embedding_size=values.count("word_embed_proj_dim", hidden),
        hidden_size=hidden,
        intermediate_size=values.count("ffn_dim"),
        num_layers=values.count("num_hidden_layers"),
        num_positions=positions + _OPT_OFFSET,
        tied=values.flag("tie_word_embeddings", True),
        bias=values.flag("enable_bias", True),
        norm_affine=values.flag("layer_norm_elementwise_affine", True),
        last_norm=norm_first and not values.flag("_remove_final_layer_norm", False),
    )
    return _plain(values, "opt", sizes, values.count("num_attention_heads"), positions)


_READERS: dict[str, Callable[[Values], ModelShape]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma3ForCausalLM": _gemma3,
    "GPT2LMHeadModel": _gpt2,
    "OPTForCausalLM": _opt,
}


def _gated(
    values: Values,
    family: str,
    *,
    q_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    num_norms: int = 2,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool = False,
    window: int | None = None,
    windowed: int = 0,
) -> ModelShape:
    """`num_kv_heads`, `head_dim` and `tied` hold where the config is silent."""
    hidden, heads = values.count("hidden_size"), values.count("num_attention_heads")
    sizes = GatedSizes(
        vocab_size=values.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=values.count("intermediate_size"),
        num_layers=values.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=values.count("num_key_value_heads", num_kv_heads or heads),
        head_dim=values.count("head_dim", head_dim or _head_dim(values, hidden, heads)),
        tied=values.flag("tie_word_embeddings", tied),
        q_bias=q_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        num_norms=num_norms,
    )
    if heads % sizes.num_kv_heads:
        raise ShapeError(
            f"{values.where}: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {sizes.num_kv_heads}"
        )
    return ModelShape(
        family=family,
        parameters=gated_parameters(sizes),
        vocab_size=sizes.vocab_size,
        hidden_size=hidden,
        intermediate_size=sizes.intermediate_size,
        num_layers=sizes.num_layers,
        num_heads=heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=values.count("max_position_embeddings"),
        window=window if windowed else None,
        num_windowed_layers=windowed,
        dtype=_dtype(values),
    )


def _plain(
    values: Values, family: str, sizes: PlainSizes, heads: int, positions: int
) -> ModelShape:
    return ModelShape(
        family=family,
        parameters=plain_parameters(sizes),
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_layers=sizes.num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=_head_dim(values, sizes.hidden_size, heads),
        max_position_embeddings=positions,
        dtype=_dtype(values),
    )


def _head_dim(values: Values, hidden: int, heads: int) -> int:
    if hidden % heads and values.get("head_dim") is None:
        raise ShapeError(f"{values.where}: hidden size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def _qwen_window(values: Values) -> tuple[int | None, int]:
    """Where windows are switched on, the layers from `max_window_layers` on have one."""
    layers = values.count("num_hidden_layers")
    if not values.flag("use_sliding_window", False) or not values.get("sliding_window"):
        return None, 0
    first = values.get("max_window_layers")
    full = (
        _QWEN_WINDOW_LAYERS
        if first is None
        else 0
        if first == 0
        else values.count("max_window_layers")
    )
    return values.count("sliding_window"), _listed_windows(values, max(0, layers - full))


def _everywhere(values: Values, window: int | None) -> int:
    return values.count("num_hidden_layers") if window else 0


def _listed_windows(values: Values, otherwise: int) -> int:
    """Layers with a window as `layer_types` lists them."""
    kinds = values.get("layer_types")
    if kinds is None:
        return otherwise
    layers = values.count("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != layers:
        told = len(kinds) if isinstance(kinds, list) else type(kinds).__name__
        raise ShapeError(f"{values.where}: layer_types lists {told} layers, there are {layers}")
    return kinds.count("sliding_attention")


def _dtype(values: Values) -> str | None:
    """Of a checkpoint in a type that can be served; None for others or none."""
    name = values.get("dtype") or values.get("torch_dtype")
    return name if isinstance(name, str) and name in DTYPE_BYTES else None
