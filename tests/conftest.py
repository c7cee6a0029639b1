"""What all tests share: the demo model's place, the fixture tokenizer's, scripted workers."""

import json
import os
from pathlib import Path

import pytest

from noria.service.gguf_file import read_gguf
from tests.support.redis_server import redis_server, redis_url, shared_redis_server

# Read when torch is first imported. Threads that spin at the end of each parallel region
# would take turns with every other process on the same cores: steps ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# gRPC tells each connection that is cut on purpose, among the tests' own lines.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Read when triton is first imported: its kernels then run on a CPU, by its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

__all__ = ["redis_server", "redis_url", "shared_redis_server"]

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA_MODEL = ROOT / ".cache" / "models" / "gemma-3-270m-q4_k_m.gguf"


def pytest_configure(config):
    # Here, since it imports gRPC, which reads the environment when it is imported.
    from tests.support.canary import WATCH

    config.pluginmanager.register(WATCH)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """SmolLM2-135M-Instruct as `make model` fetches it."""
    if not DEMO_MODEL.exists():
        pytest.fail(f"{DEMO_MODEL.relative_to(ROOT)} is missing; run `make model`")
    read_gguf(DEMO_MODEL)
    return DEMO_MODEL


@pytest.fixture(scope="session")
def gemma_model_path() -> Path:
    """Gemma 3 270M, where it has been fetched: a SentencePiece vocabulary of 262,144 ids."""
    if not GEMMA_MODEL.exists():
        pytest.skip(f"{GEMMA_MODEL.relative_to(ROOT)} is missing; `make gemma` fetches it")
    return GEMMA_MODEL


@pytest.fixture(scope="session")
def golden_model() -> Path:
    """The fixture tokenizer with its config: a scripted worker loads it as its model."""
    return Path(__file__).parent / "fixtures" / "golden"


@pytest.fixture
def script_file(tmp_path):
    """Writes a script for a scripted worker and gives its path."""

    def write(scripts=(), **settings) -> Path:
        path = tmp_path / "script.json"
        path.write_text(json.dumps({"scripts": list(scripts), **settings}))
        return path

    return write
