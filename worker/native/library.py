"""Build the kernels, or find them built: one shared library per sources, options and compiler."""

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from worker.native.variants import Variant

_SOURCES = Path(__file__).parent / "source"
_COMPILERS = ("g++", "c++", "clang++")
# Nothing that lets a compiler change the order or the rounding of sums: a row's bits must
# not depend on which loop computed it.
_OPTIONS = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-fPIC", "-shared",
    "-pthread", "-w",
)  # fmt: skip
_COMPILE_LIMIT_S = 120.0
_HASH_LENGTH = 16


class BuildError(Exception):
    """The kernels cannot be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A command that compiles C++, and what it says of its version."""

    command: tuple[str, ...]
    version: str


def find_compiler(environment: Mapping[str, str]) -> Compiler:
    """CXX if that is set, else the first of g++, c++, clang++. Raises BuildError."""
    named = shlex.split(environment.get("CXX", ""))
    for command in [named] if named else [[name] for name in _COMPILERS]:
        path = shutil.which(command[0], path=environment.get("PATH"))
        if path is not None:
            return Compiler((path, *command[1:]), _output_of([path, "--version"]))
    looked_for = f"CXX = {named[0]}" if named else ", ".join(_COMPILERS)
    raise BuildError(f"no C++ compiler found (looked for {looked_for})")


class KernelCache:
    """A folder of built kernels. Several processes may use it at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, variant: Variant, compiler: Compiler | None) -> Path | None:
        """The built library; without a compiler, one that any compiler has built."""
        if compiler is not None:
            path = self._path(variant, compiler)
            return path if path.exists() else None
        return next(iter(sorted(self._folder.glob(f"{_stem(variant)}-*.so"))), None)

    def build(self, variant: Variant, compiler: Compiler) -> Path:
        """Compile into the folder; whole or not at all. Raises BuildError, OSError."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._path(variant, compiler)
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            built = Path(folder) / "kernels.so"
            _compile(variant, compiler, built)
            # Atomic: who finds the name finds the whole file, whoever else builds it too.
            built.replace(path)
        return path

    def _path(self, variant: Variant, compiler: Compiler) -> Path:
        return self._folder / f"{_stem(variant)}-{_hash(compiler.command, compiler.version)}.so"


@contextlib.contextmanager
def writable_cache(folder: Path) -> Iterator[KernelCache]:
    """The cache in `folder`, or a passing one where nothing can be written there.

    A library stays usable after its file is gone.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        with tempfile.TemporaryDirectory() as passing:
            yield KernelCache(Path(passing))
    else:
        yield KernelCache(folder)


def _compile(variant: Variant, compiler: Compiler, built: Path) -> None:
    sources = [str(path) for path in _source_files() if path.suffix == ".cpp"]
    options = (*_OPTIONS, *variant.options, "-o", str(built))
    command = [*compiler.command, *options, *sources]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMPILE_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler.command[0]} took over {_COMPILE_LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        reason = lines[0] if lines else f"exit status {done.returncode}"
        raise BuildError(f"{compiler.command[0]} failed: {reason}")


def _source_files() -> list[Path]:
    return sorted(path for path in _SOURCES.iterdir() if path.suffix in (".h", ".cpp"))


def _stem(variant: Variant) -> str:
    contents = (f"{path.name}\n{path.read_text()}" for path in _source_files())
    return f"{variant.name}-{_hash(*contents, *_OPTIONS, *variant.options)}"


def _hash(*parts: str | tuple[str, ...]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:_HASH_LENGTH]


def _output_of(command: list[str]) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMPILE_LIMIT_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error


def installed_kernels() -> KernelCache:
    """Those that `python -m worker.native.prebuild` has built for this installation."""
    return KernelCache(Path(sys.prefix) / "share" / "noria" / "kernels")


def kernels_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """NORIA_CACHE_DIR/kernels, else kernels in Noria's folder of the user's cache."""
    own = environment.get("NORIA_CACHE_DIR")
    if own:
        return Path(own).absolute() / "kernels"
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "noria" / "kernels"
