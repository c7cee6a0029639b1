"""A model of the Hugging Face hub: `org/name`, or `org/name@revision`."""

import re
from dataclasses import dataclass
from pathlib import Path

from noria.cli.wheel_models import Announce, ModelSourceError

_HUB_ID = re.compile(r"(\w[\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
# What the worker and the tokenizer read, of the repository's top folder alone. Pickled
# weights are never loaded, and "consolidated" ones are the same weights once more.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")
_CONFIG = "config.json"
_UNWANTED = ("*/*", "consolidated*")


@dataclass(frozen=True)
class HubModel:
    """A repository of the hub; without a revision its main branch."""

    repo_id: str
    revision: str | None

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"


def hub_model(model: str) -> HubModel | None:
    """None for what cannot be a repository's name."""
    match = _HUB_ID.fullmatch(model)
    return None if match is None else HubModel(match[1], match[2])


def fetch_from_hub(model: HubModel, announce: Announce) -> Path:
    """The folder in the hub's own cache, downloaded as far as it is not there.

    Progress bars go to stderr. Raises ModelSourceError in one line.
    """
    folder = _snapshot(model, _WANTED, announce)
    if not any(folder.glob("*.safetensors")):
        raise ModelSourceError(
            f"model {model}: its repository holds no .safetensors files (other kinds of weights"
            " are not loaded)"
        )
    return folder


def config_from_hub(model: HubModel, announce: Announce) -> Path:
    """Its config.json and nothing else. Raises ModelSourceError."""
    path = _snapshot(model, (_CONFIG,), announce) / _CONFIG
    if not path.is_file():
        raise ModelSourceError(f"model {model}: its repository holds no {_CONFIG}")
    return path


def _snapshot(model: HubModel, wanted: tuple[str, ...], announce: Announce) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelSourceError(
            f'model {model}: the hub needs a further package: pip install "noria[hub]"'
        ) from error
    announce(f"fetching {model} from the hub, what of it is not in its cache")
    try:
        folder = snapshot_download(
            model.repo_id,
            revision=model.revision,
            allow_patterns=list(wanted),
            ignore_patterns=list(_UNWANTED),
        )
    except Exception as error:
        # The hub's client raises errors of several libraries; all mean that it gave no files.
        problem = f"the hub gave no files: {_summary(error)}"
        raise ModelSourceError(f"model {model}: {problem}") from error
    return Path(folder)


def _summary(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
