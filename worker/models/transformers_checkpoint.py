"""A Hugging Face folder whose architecture only `transformers` knows."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from noria.models.config import ConfigError, ModelConfig
from noria.models.family import Layout, weight_bytes
from noria.models.fields import Fields
from noria.models.foreign import refuse_unpaged
from noria.models.hf_config import hf_architecture, hf_eos_token_ids, read_object
from noria.models.plain import PLAIN
from worker.models.safetensors_weights import SafetensorsWeights
from worker.models.transformers_check import check_against_own, own_logits, probe_ids
from worker.models.transformers_model import TransformersModel
from worker.models.weights import Progress, WeightsError, first_few, silent

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "eos_token_id",
)
# Constants that old checkpoints hold beside the parameters, and transformers makes anew:
# angles, masks (booleans or bytes among them), positions.
_CONSTANTS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|position_ids"
    r"|(attn|attention|crossattention)\.(bias|masked_bias|causal_mask))$"
)
_LAYER_TYPES = ("full_attention", "sliding_attention")
# These change all frequencies with the longest sequence of a batch.
_ROPE_TYPES_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class TransformersCheckpoint:
    """A model's description and its weights, opened but not read."""

    config: ModelConfig
    folder: Path
    source: SafetensorsWeights
    model_class: Any
    hf_config: Any
    layout: Layout | None = None

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """What the weights take in memory once they are read, as far as their files tell."""
        if self.layout is not None:
            return weight_bytes(self.layout.all(), dtype.itemsize)
        return sum(map(math.prod, self.source.shapes().values())) * dtype.itemsize

    def load(
        self, dtype: torch.dtype = torch.float32, progress: Progress = silent
    ) -> TransformersModel:
        """Raises WeightsError or ConfigError with the reason for what cannot be served."""
        total = len(self.source.shapes())
        progress(0, total)
        try:
            model, report = self.model_class.from_pretrained(
                self.folder, dtype=dtype, attn_implementation="eager", local_files_only=True,
                use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
        except (RuntimeError, ValueError, OSError) as error:
            raise WeightsError(f"{self.folder}: {error}") from error
        _check_report(report)
        _check_finite(model)
        progress(total, total)
        return self._with_our_attention(model.eval())

    def _with_our_attention(self, model: Any) -> TransformersModel:
        token_ids = probe_ids(self.config.vocab_size)
        name = type(model).__name__
        try:
            own = own_logits(model, token_ids)
            ours = TransformersModel(model)
            _check_windows(self.hf_config, [call.window for call in ours.calls])
            check_against_own(ours, own, token_ids)
        except ConfigError as error:
            raise ConfigError(f"{self.folder}: {name}: {error}") from error
        except Exception as error:
            # Foreign code, run in a way it may not foresee, can fail in any way.
            told = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{self.folder}: {name} does not run here: {told}") from error
        return ours


def open_with_transformers(folder: Path) -> TransformersCheckpoint:
    """Raises ConfigError or WeightsError with the reason, OSError."""
    where, raw = str(folder / "config.json"), read_object(folder / "config.json")
    architecture = hf_architecture(where, raw)
    refuse_unpaged(where, architecture, raw)
    transformers = _transformers(where, architecture)
    model_class = _model_class(where, architecture, transformers)
    hf_config = _hf_config(where, folder, transformers)
    _check_layers(where, hf_config)
    config: ModelConfig
    layout: Layout | None = None
    if architecture in PLAIN:
        config, layout = PLAIN[architecture](where, folder, raw)
    else:
        config = _model_config(folder, architecture, hf_config)
    source = SafetensorsWeights(folder, _CONSTANTS)
    config.check_num_layers(len(source.shapes()))
    return TransformersCheckpoint(config, folder, source, model_class, hf_config, layout)


def _transformers(where: str, architecture: str) -> Any:
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"{where}: architectures = [{architecture!r}] needs a further package: "
            'pip install "noria[transformers]"'
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _model_class(where: str, architecture: str, transformers: Any) -> Any:
    auto = import_module("transformers.models.auto.modeling_auto")
    names = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if architecture not in names:
        raise ConfigError(
            f"{where}: architectures = [{architecture!r}] is not supported: it is no causal "
            f"language model of transformers {transformers.__version__}"
        )
    return getattr(transformers, architecture)


def _hf_config(where: str, folder: Path, transformers: Any) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # Its checks of a config raise errors of several kinds.
        raise ConfigError(f"{where}: transformers refuses it: {error}") from error


def _check_layers(where: str, hf_config: Any) -> None:
    kinds = getattr(hf_config, "layer_types", None)
    strange = [kind for kind in kinds or () if kind not in _LAYER_TYPES]
    if strange:
        raise ConfigError(f"{where}: layer_types = {strange[0]!r} is not supported")
    rope = getattr(hf_config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        kind = part.get("rope_type") if isinstance(part, Mapping) else None
        if kind in _ROPE_TYPES_BY_LENGTH:
            raise ConfigError(f"{where}: rope_parameters.rope_type = {kind!r} is not supported")


def _model_config(folder: Path, architecture: str, hf_config: Any) -> ModelConfig:
    values = {name: getattr(hf_config, name, None) for name in _SIZES}
    fields = Fields(str(folder / "config.json"), values)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // max(num_heads, 1)),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        eos_token_ids=hf_eos_token_ids(folder, fields),
    )


def _check_report(report: Mapping[str, Any]) -> None:
    """What transformers would only warn of: it fills missing tensors with random numbers."""
    kinds = {"missing": "missing_keys", "surplus": "unexpected_keys", "shape": "mismatched_keys"}
    names = {kind: sorted(map(str, report.get(key) or ())) for kind, key in kinds.items()}
    names["surplus"] = [name for name in names["surplus"] if not _CONSTANTS.search(name)]
    faults = [f"{kind}: {first_few(named)}" for kind, named in names.items() if named]
    if faults:
        raise WeightsError("weights do not fit the config: " + "; ".join(faults))


def _check_finite(model: Any) -> None:
    for name, weight in model.named_parameters():
        if not all(bound.isfinite() for bound in torch.aminmax(weight)):
            raise WeightsError(f"the weights hold NaN or infinity in {name}")


def _check_windows(hf_config: Any, windows: list[int | None]) -> None:
    """A window that a layer does not tell its attention function would not be honoured."""
    window = getattr(hf_config, "sliding_window", None)
    if window is None or getattr(hf_config, "use_sliding_window", True) is False:
        return
    kinds = getattr(hf_config, "layer_types", None) or ["sliding_attention"] * len(windows)
    for layer, (kind, told) in enumerate(zip(kinds, windows, strict=True)):
        if kind == "sliding_attention" and told is None:
            raise ConfigError(
                f"sliding_window = {window} does not reach attention in layer {layer}"
            )
