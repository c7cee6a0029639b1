"""Which family serves which architecture."""

from worker.models.base import ModelFamily
from worker.models.config import ConfigError
from worker.models.llama import LLAMA

FAMILIES = {"llama": LLAMA}


def family_of(architecture: str) -> ModelFamily:
    """Raises ConfigError naming the architecture and those that are served."""
    if architecture not in FAMILIES:
        served = ", ".join(FAMILIES)
        raise ConfigError(f"architecture {architecture!r} is not supported (supported: {served})")
    return FAMILIES[architecture]
