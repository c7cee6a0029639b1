"""Any model that is known, from its folder, its config.json or its GGUF file."""

from dataclasses import dataclass
from pathlib import Path

from noria.models.config import ConfigError, DecoderConfig
from noria.models.family import Layout
from noria.models.foreign import refuse_unpaged
from noria.models.gguf_config import read_gguf_config
from noria.models.hf_config import config_file, hf_architecture, read_hf_config, read_object
from noria.models.plain import PLAIN, PlainConfig
from noria.models.registry import HF_ARCHITECTURES, family_of
from noria.service.gguf_file import read_gguf


@dataclass(frozen=True, slots=True)
class Description:
    """A model's sizes and tensors. `dtype` is that of the checkpoint, None if it is not said."""

    config: DecoderConfig | PlainConfig
    layout: Layout
    dtype: str | None = None


def describe(path: Path) -> Description:
    """Reads no weights. Raises ConfigError, GGUFError (both ValueError) with the reason, OSError.

    What a worker would refuse is refused here, with the same words.
    """
    if path.is_dir() or path.suffix == ".json":
        return _of_config(path)
    config = read_gguf_config(read_gguf(path))
    return Description(config, family_of(config.architecture).layout(config))


def _of_config(path: Path) -> Description:
    where, values = str(config_file(path)), read_object(config_file(path))
    architecture, dtype = hf_architecture(where, values), values.get("dtype")
    dtype = values.get("torch_dtype") if dtype is None else dtype
    told = dtype if isinstance(dtype, str) else None
    if architecture in HF_ARCHITECTURES:
        config = read_hf_config(path)
        return Description(config, family_of(config.architecture).layout(config), told)
    if architecture not in PLAIN:
        known = ", ".join((*HF_ARCHITECTURES, *PLAIN))
        raise ConfigError(
            f"{where}: architectures = [{architecture!r}] is not known without its code"
            f" (known: {known})"
        )
    refuse_unpaged(where, architecture, values)
    return Description(*PLAIN[architecture](where, path, values), told)
