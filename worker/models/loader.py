"""Open a model: a GGUF file, or a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path

import torch

from noria.service.gguf_file import read_gguf
from worker.attention.base import AttentionBackend
from worker.models.base import Model, ModelFamily
from worker.models.config import DecoderConfig
from worker.models.gguf_config import read_gguf_config
from worker.models.hf_config import read_hf_config
from worker.models.registry import family_of
from worker.models.weights import Progress, WeightSource, expected_shapes, load_parameters


def _silent(done: int, total: int) -> None:
    del done, total


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's description and its weights, opened but not read."""

    config: DecoderConfig
    family: ModelFamily
    source: WeightSource

    def load(
        self, dtype: torch.dtype = torch.float32, progress: Progress = _silent
    ) -> Model[AttentionBackend]:
        """Read the weights in `dtype`; `progress` gets (tensors read, tensors in all).

        Raises WeightsError, before reading, if the weights do not fit the config.
        """
        parameters = self.family.parameters(self.config)
        return self.family.build(
            self.config, load_parameters(parameters, self.source, dtype, progress)
        )


def open_checkpoint(path: Path) -> Checkpoint:
    """Raises ConfigError, WeightsError or GGUFError (all ValueError) with the reason, OSError."""
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_folder(folder: Path) -> Checkpoint:
    from worker.models.safetensors_weights import SafetensorsWeights

    config = read_hf_config(folder)
    family, source = family_of(config.architecture), SafetensorsWeights(folder)
    config.check_num_layers(len(source.shapes()))
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
