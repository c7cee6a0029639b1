"""Generate the stubs in noria/v1 from protos/; with --check, say whether they are stale."""

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
STUBS = ROOT / "noria" / "v1"


def generate(into: Path) -> None:
    """Write message and service stubs, with types, below `into`."""
    sources = sorted(str(path) for path in (PROTOS / "noria" / "v1").glob("*.proto"))
    includes = [f"-I{PROTOS}", f"-I{files('grpc_tools') / '_proto'}"]
    outputs = ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")
    scripts = Path(sys.executable).parent
    plugins = [f"--plugin={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    targets = [f"--{name}={into}" for name in outputs]
    code = protoc.main(["protoc", *includes, *plugins, *targets, *sources])
    if code != 0:
        raise SystemExit(f"protoc failed with exit status {code}")


def stale(fresh: Path) -> list[str]:
    """Names of stubs that differ from what the protos give, missing and surplus ones included."""
    patterns = ("*_pb2*.py", "*_pb2*.pyi")
    made = {path.name: path.read_bytes() for p in patterns for path in fresh.glob(p)}
    kept = {path.name: path.read_bytes() for p in patterns for path in STUBS.glob(p)}
    return sorted(name for name in made.keys() | kept.keys() if made.get(name) != kept.get(name))


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        differing = stale(Path(folder) / "noria" / "v1")
    if differing:
        raise SystemExit(f"stale stubs: {', '.join(differing)}; run `make protos`")


if __name__ == "__main__":
    main()
