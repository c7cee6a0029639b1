"""Which family serves which architecture."""

from noria.models.config import ConfigError
from noria.models.family import ModelFamily
from noria.models.gemma3 import GEMMA3
from noria.models.llama import LLAMA
from noria.models.mistral import MISTRAL
from noria.models.qwen import QWEN2, QWEN3

FAMILIES = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma3": GEMMA3,
}
# As config.json's `architectures` calls them. GGUF's `general.architecture` has our names.
HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


def family_of(architecture: str) -> ModelFamily:
    """Raises ConfigError naming the architecture and those that are served."""
    if architecture not in FAMILIES:
        served = ", ".join(FAMILIES)
        raise ConfigError(f"architecture {architecture!r} is not supported (supported: {served})")
    return FAMILIES[architecture]
