"""Open a model: a GGUF file, or a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path

import torch

from noria.models.config import DecoderConfig
from noria.models.family import Layout, ModelFamily, Parameter, weight_bytes
from noria.models.gguf_config import read_gguf_config
from noria.models.hf_config import hf_architecture, read_hf_config, read_object
from noria.models.registry import HF_ARCHITECTURES, family_of
from noria.service.gguf_file import read_gguf
from worker.attention.base import AttentionBackend
from worker.models.base import Model
from worker.models.registry import BUILDERS
from worker.models.safetensors_weights import SafetensorsWeights
from worker.models.transformers_checkpoint import TransformersCheckpoint, open_with_transformers
from worker.models.weights import (
    HOST,
    Progress,
    WeightSource,
    expected_shapes,
    load_parameters,
    silent,
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model of a family built here: its description and its weights, opened but not read."""

    config: DecoderConfig
    family: ModelFamily
    source: WeightSource

    @property
    def layout(self) -> Layout:
        return self.family.layout(self.config)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """What the weights take in memory once they are read."""
        return weight_bytes(self._parameters(), dtype.itemsize)

    def load(
        self,
        dtype: torch.dtype = torch.float32,
        progress: Progress = silent,
        device: torch.device = HOST,
    ) -> Model[AttentionBackend]:
        """Read the weights in `dtype`; `progress` gets (tensors read, tensors in all).

        Each goes to the device as it is read: the host never holds more than a few.

        Raises WeightsError, before reading, if the weights do not fit the config.
        """
        return BUILDERS[self.config.architecture](self.config, self.read(dtype, progress, device))

    def read(
        self,
        dtype: torch.dtype = torch.float32,
        progress: Progress = silent,
        device: torch.device = HOST,
    ) -> dict[str, torch.Tensor]:
        """The weights under the family's names; else as `load`."""
        return load_parameters(self._parameters(), self.source, dtype, progress, device)

    def _parameters(self) -> list[Parameter]:
        return self.layout.all()


def open_checkpoint(path: Path) -> Checkpoint | TransformersCheckpoint:
    """A GGUF file, or a Hugging Face folder; `transformers` for what has no family here.

    Raises ConfigError, WeightsError or GGUFError (all ValueError) with the reason, OSError.
    """
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_folder(folder: Path) -> Checkpoint | TransformersCheckpoint:
    where, values = str(folder / "config.json"), read_object(folder / "config.json")
    if hf_architecture(where, values) not in HF_ARCHITECTURES:
        return open_with_transformers(folder)
    config = read_hf_config(folder)
    family, source = family_of(config.architecture), SafetensorsWeights(folder)
    config.check_num_layers(len(source.shapes()))
    if config.tie_word_embeddings:
        source.drop_copy("lm_head.weight", of="model.embed_tokens.weight")
    return Checkpoint(config, family, source)


def _open_gguf(path: Path) -> Checkpoint:
    # Only here, so that a worker on a Hugging Face folder needs no gguf package.
    from worker.models.gguf_weights import GGUFWeights

    file = read_gguf(path)
    config = read_gguf_config(file)
    config.check_num_layers(len(file.tensors))
    family = family_of(config.architecture)
    shapes = expected_shapes(family.parameters(config))
    source = GGUFWeights(file, {name: family.gguf.tensor(name, config) for name in shapes})
    return Checkpoint(config, family, source)
