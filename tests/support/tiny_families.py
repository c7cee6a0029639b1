"""Tiny random models of every family, with each feature that its config can switch on.

Weights are large enough to make logits differ, windows and patterns small enough to
matter within a prompt of forty tokens.
"""

from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support.tiny_models import randomised

VOCAB, LAYERS = 131, 3
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "num_hidden_layers": LAYERS, "intermediate_size": 96,
    "max_position_embeddings": 256, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
    "tie_word_embeddings": False, "initializer_range": 0.15,
}  # fmt: skip
_WITHOUT_HEAD_DIM = {k: v for k, v in _SIZES.items() if k != "head_dim"}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
_LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
_YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_LOCAL = {"rope_type": "default", "rope_theta": 100.0}

# Case -> transformers' class, its config's class, settings.
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama, tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama, one KV head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama, llama3 rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LLAMA3}),
    "llama, linear rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LINEAR}),
    "llama, yarn rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _YARN}),
    "llama, yarn by scales": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "rope_parameters": _YARN
            | {"mscale": 0.7, "mscale_all_dim": 2.0, "beta_fast": 8, "beta_slow": 0.6}
        },
    ),
    "llama, biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral, window": (MistralForCausalLM, MistralConfig, {"sliding_window": 11}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2, windows": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3, yarn rope": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"rope_parameters": _YARN | {"attention_factor": 1.4}},
    ),
    "qwen3, biases and windows": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "sliding_window": 7,
            "num_hidden_layers": 7,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 32,
        },
    ),
    "gemma3, everything": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 50,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
            "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _LOCAL},
        },
    ),
}
# Those that transformers' own code computes here.
_SMALL = {"vocab_size": VOCAB, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
_GPT2 = {**_SMALL, "n_positions": 64, "n_embd": 48, "n_layer": LAYERS, "n_head": 3,
         "initializer_range": 0.15}  # fmt: skip
_OPT = {**_SMALL, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": LAYERS,
        "num_attention_heads": 3, "max_position_embeddings": 64, "init_std": 0.15}  # fmt: skip
FOREIGN = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, _GPT2),
    "gpt2, scaled by layer": (
        GPT2LMHeadModel,
        GPT2Config,
        {**_GPT2, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
    ),
    "opt": (OPTForCausalLM, OPTConfig, _OPT),
    "opt, projected, norms after": (
        OPTForCausalLM,
        OPTConfig,
        {**_OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "enable_bias": False},
    ),
}


def tiny_family(case: str, **changed):
    """transformers' model of a case above, in fp32; `changed` replaces its settings."""
    if case in FOREIGN:
        kind, config, settings = FOREIGN[case]
        return randomised(kind, config(**(settings | changed)))
    kind, config, settings = FAMILIES[case]
    sizes = _WITHOUT_HEAD_DIM if config is Qwen2Config else _SIZES
    return randomised(kind, config(**(sizes | settings | changed)))
