"""A model of the Hugging Face hub: `org/name`, `org/name@revision`, or one GGUF file of it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noria.cli.wheel_models import Announce, ModelSourceError

_REPO = r"(?P<repo>\w[\w.-]*/[\w.-]+)"
_FILE = r"(?P<file>\w[\w. -]*(?:/\w[\w. -]*)*\.gguf)"
_FORMS = (
    re.compile(rf"{_REPO}(?:@(?P<revision>[\w./-]+?(?<!\.gguf)))?(?::{_FILE})?"),
    re.compile(rf"{_REPO}/{_FILE}"),
)
# One of several files of a model, none of which can be read without the others.
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf")
# What the worker and the tokenizer read, of the repository's top folder alone. Pickled
# weights are never loaded, and "consolidated" ones are the same weights once more.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")
_CONFIG = "config.json"
_UNWANTED = ("*/*", "consolidated*")
_MAX_NAMED, _HINT_TIMEOUT_S = 12, 5.0


@dataclass(frozen=True)
class HubModel:
    """A repository of the hub, or one GGUF file of it; without a revision its main branch."""

    repo_id: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        at = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repo_id}{at}" + ("" if self.file is None else f":{self.file}")


def hub_model(model: str) -> HubModel | None:
    """None for what cannot be a repository's name or a file of one."""
    match = next(filter(None, (form.fullmatch(model) for form in _FORMS)), None)
    if match is None:
        return None
    named = match.groupdict()
    return HubModel(named["repo"], named.get("revision"), named["file"])


def fetch_from_hub(model: HubModel, announce: Announce) -> Path:
    """The folder, or the GGUF file, in the hub's own cache; what is there is not downloaded.

    Progress bars go to stderr. Raises ModelSourceError in one line.
    """
    if model.file is not None:
        return _file(model, model.file, announce)
    folder = _snapshot(model, _WANTED, announce)
    if not any(folder.glob("*.safetensors")):
        raise ModelSourceError(
            f"model {model}: its repository holds no .safetensors files (other kinds of weights"
            f" are not loaded){_offered(model)}"
        )
    return folder


def config_from_hub(model: HubModel, announce: Announce) -> Path:
    """Its config.json and nothing else. Raises ModelSourceError."""
    path = _snapshot(model, (_CONFIG,), announce) / _CONFIG
    if not path.is_file():
        raise ModelSourceError(f"model {model}: its repository holds no {_CONFIG}")
    return path


def _snapshot(model: HubModel, wanted: tuple[str, ...], announce: Announce) -> Path:
    hub = _client(model)
    announce(f"fetching {model} from the hub, what of it is not in its cache")
    return _given(
        model,
        lambda: hub.snapshot_download(
            model.repo_id,
            revision=model.revision,
            allow_patterns=list(wanted),
            ignore_patterns=list(_UNWANTED),
        ),
    )


def _file(model: HubModel, file: str, announce: Announce) -> Path:
    if _SPLIT.search(file):
        raise ModelSourceError(
            f"model {model}: it is one part of a model in several files, which are not read;"
            " llama-gguf-split --merge makes one file of them"
        )
    hub = _client(model)
    announce(f"fetching {model} from the hub, unless it is in its cache")

    def download() -> str:
        try:
            path: str = hub.hf_hub_download(model.repo_id, file, revision=model.revision)
        except hub.errors.LocalEntryNotFoundError:
            raise
        except hub.errors.EntryNotFoundError as error:
            problem = f"its repository holds no {file}{_offered(model)}"
            raise ModelSourceError(f"model {model}: {problem}") from error
        return path

    return _given(model, download)


def _client(model: HubModel) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelSourceError(
            f'model {model}: the hub needs a further package: pip install "noria[hub]"'
        ) from error
    return huggingface_hub


def _given(model: HubModel, download: Callable[[], str]) -> Path:
    try:
        return Path(download())
    except ModelSourceError:
        raise
    except Exception as error:
        # The hub's client raises errors of several libraries; all mean that it gave no files.
        problem = f"the hub gave no files: {_summary(error)}"
        raise ModelSourceError(f"model {model}: {problem}") from error


def _offered(model: HubModel) -> str:
    """The GGUF files of its repository, for who did not name one of them."""
    hub = _client(model)
    try:
        about = hub.model_info(model.repo_id, revision=model.revision, timeout=_HINT_TIMEOUT_S)
    except Exception:
        # Only a hint: the reason why there are no files has been found already.
        return ""
    files = [sibling.rfilename for sibling in about.siblings or ()]
    whole = [f for f in files if f.endswith(".gguf") and not _SPLIT.search(f)]
    if not whole:
        return ""
    more = f" and {len(whole) - _MAX_NAMED} more" if len(whole) > _MAX_NAMED else ""
    return f"; it holds {', '.join(whole[:_MAX_NAMED])}{more}: name one, {model.repo_id}:FILE.gguf"


def _summary(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
