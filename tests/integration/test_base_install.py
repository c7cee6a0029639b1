"""The base install alone is a client: no torch, no service's packages, and it streams."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.noria.fake_chat import FakeChat, serving

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("noria", "router", "tokenizer_svc", "worker")
UNREACHABLE = ("NewConnectionError", "Max retries exceeded", "ProxyError", "name resolution")

STREAM = """
import importlib.util, sys
from noria import Client
with Client(sys.argv[1], api_key="k") as client, client.stream_chat("q") as stream:
    for piece in stream:
        print(piece, end="|")
absent = ("torch", "structlog", "tokenizers", "grpc_health", "redis")
assert not [name for name in absent if importlib.util.find_spec(name)]
"""


def copied_sources(to):
    for name in SOURCES:
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, to)
    return to


@pytest.fixture(scope="module")
def base_bin(tmp_path_factory):
    """The bin folder of a new environment that holds noria and its own dependencies."""
    folder = tmp_path_factory.mktemp("base")
    venv.create(folder / "venv", with_pip=False)
    source = folder / "source"
    source.mkdir()
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    options = ["--retries", "1", "--constraint", str(ROOT / "constraints.txt")]
    installed = subprocess.run(
        [*pip, *options, str(copied_sources(source))], capture_output=True, text=True, check=False
    )
    if any(sign in installed.stderr for sign in UNREACHABLE):
        pytest.skip("the package index cannot be reached")
    assert installed.returncode == 0, installed.stderr
    return python.parent


def run(*command, cwd):
    # Away from the repository, and isolated, so that only what is installed is found.
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=60)


def test_the_client_streams_with_the_base_install_alone(base_bin, tmp_path):
    with serving(FakeChat()) as chat:
        result = run(base_bin / "python", "-I", "-c", STREAM, chat.address, cwd=tmp_path)
    assert (result.stdout, result.stderr) == ("Yes|,| it is.|", "")


def test_the_command_chats_with_the_base_install_alone(base_bin, tmp_path):
    with serving(FakeChat()) as chat:
        result = run(base_bin / "noria", "chat", "--address", chat.address, "q", cwd=tmp_path)
    assert (result.stdout, result.returncode) == ("Yes, it is.\n", 0)


def test_up_says_in_one_line_what_the_base_install_lacks(base_bin, tmp_path):
    result = run(base_bin / "noria", "up", cwd=tmp_path)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert 'pip install "noria[all]"' in result.stderr
