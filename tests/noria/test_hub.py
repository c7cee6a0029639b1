"""A model of the hub: what is downloaded of it, from where, and one plain line if it fails."""

import builtins
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from noria.cli.hub import HubModel, hub_model
from noria.cli.model_source import ModelSourceError, config_of, resolve_model

hub = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
# No two alike: the client keeps one copy of equal files.
FILES = {
    "config.json": b"{}",
    "model-00001-of-00001.safetensors": b"weights",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "tokenizer.json": b'{"model": {}}',
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "consolidated.safetensors": b"the same weights",
    "pytorch_model.bin": b"pickle",
    "original/params.json": b'{"dim": 1}',
    "onnx/model.onnx": b"onnx",
    "README.md": b"# Model",
    "Model-Q4_K_M.gguf": b"GGUF of four bits",
    "quants/Model-Q8_0.gguf": b"GGUF of eight bits",
    "Model-F16-00001-of-00002.gguf": b"half of a GGUF",
}
WANTED = {name for name in FILES if name.startswith(("config", "model", "tokenizer", "chat"))}
GGUF = "Model-Q4_K_M.gguf"


def quiet(_line):
    pass


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("org/name", HubModel("org/name", None)),
        ("org/Name-1.5@v1.0", HubModel("org/Name-1.5", "v1.0")),
        ("org/name@refs/pr/3", HubModel("org/name", "refs/pr/3")),
        ("name", None),
        ("org/name@", None),
        ("org/name/file", None),
        ("org/name:file.gguf", HubModel("org/name", None, "file.gguf")),
        ("org/name/file.gguf", HubModel("org/name", None, "file.gguf")),
        ("org/name/sub/Model-Q4_K_M.gguf", HubModel("org/name", None, "sub/Model-Q4_K_M.gguf")),
        ("org/name@v1.0:sub/m.gguf", HubModel("org/name", "v1.0", "sub/m.gguf")),
        ("org/name@refs/pr/3:m.gguf", HubModel("org/name", "refs/pr/3", "m.gguf")),
        ("org/name@v1/m.gguf", None),
        ("org/name:file.bin", None),
        ("org/name:../file.gguf", None),
        ("org/name/../file.gguf", None),
        ("org/name:/etc/file.gguf", None),
        ("org/name:", None),
        ("../name", None),
        ("/org/name", None),
        ("org/na me", None),
    ],
)
def test_names_of_repositories(text, model):
    assert hub_model(text) == model


def test_without_its_package_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def absent(name, *rest):
        if name == "huggingface_hub":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ModelSourceError, match=r"noria\[hub\]"):
        resolve_model("org/name", quiet)


def test_a_failure_is_one_plain_line(monkeypatch):
    def unreachable(*_args, **_kwargs):
        raise ConnectionError("no route\nlong story")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(ModelSourceError, match=r"org/Name@v2: .*no route$"):
        resolve_model("org/Name@v2", quiet)


def test_a_repository_without_safetensors_is_refused(monkeypatch, tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "pytorch_model.bin").touch()
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr(hub, "model_info", None)
    with pytest.raises(ModelSourceError, match=r"org/name: .*no \.safetensors"):
        resolve_model("org/name", quiet)


def test_of_a_plan_only_the_config_is_fetched(monkeypatch, tmp_path):
    def snapshot(repo_id, revision, allow_patterns, ignore_patterns):
        assert (repo_id, revision, allow_patterns) == ("org/name", "v1", ["config.json"])
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    with pytest.raises(ModelSourceError, match=r"org/name@v1: .*no config\.json"):
        config_of("org/name@v1", quiet)
    (tmp_path / "config.json").touch()
    assert config_of("org/name@v1", quiet).path == tmp_path / "config.json"


@contextmanager
def fake_hub(requested):
    """A hub with one repository at one revision; `requested` collects what was downloaded."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(body=True)

        def do_HEAD(self):
            self.answer(body=False)

        def answer(self, body):
            path = self.path.split("?")[0]
            if path in ("/api/models/org/name/revision/v1", "/api/models/org/name"):
                siblings = [{"rfilename": name} for name in FILES]
                about = {"id": "org/name", "sha": COMMIT, "siblings": siblings}
                return self.send(200, json.dumps(about).encode(), body)
            if re.match(f"/api/models/org/name/tree/({COMMIT}|v1|main)", path):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                    for name, data in FILES.items()
                ]
                return self.send(200, json.dumps(tree).encode(), body)
            prefix = re.match(f"/org/name/resolve/({COMMIT}|v1|main)/", path)
            name = path[prefix.end() :] if prefix else ""
            if name in FILES:
                if body:
                    requested.add(name)
                return self.send(200, FILES[name], body)
            return self.send(404, b"", body, "EntryNotFound" if prefix else "RepoNotFound")

        def send(self, status, data, body, error=None):
            self.send_response(status)
            if error is not None:
                self.send_header("X-Error-Code", error)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hash(data):x}"')
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def resolved_elsewhere(model, endpoint, home):
    """In a process of its own: the hub's client reads its environment once."""
    program = (
        "import sys; from noria.cli.model_source import resolve_model, ModelSourceError\n"
        "try: source = resolve_model(sys.argv[1], lambda line: None)\n"
        "except ModelSourceError as error: sys.exit(str(error))\n"
        "print(source.name, source.path)"
    )
    environment = {
        **os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", program, model], env=environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def test_what_is_needed_of_a_revision_is_downloaded_and_nothing_else(tmp_path):
    """A second time nothing is downloaded; without a network neither."""
    requested = set()
    with fake_hub(requested) as endpoint:
        done = resolved_elsewhere("org/name@v1", endpoint, tmp_path)
        assert done.returncode == 0, done.stderr
        assert requested == WANTED
        requested.clear()
        assert resolved_elsewhere("org/name@v1", endpoint, tmp_path).stdout == done.stdout
        assert not requested
    name, path = done.stdout.split()
    assert name == "org/name"
    assert path.endswith(COMMIT)
    offline = resolved_elsewhere("org/name@v1", endpoint, tmp_path)
    assert offline.stdout == done.stdout


@pytest.mark.parametrize(
    ("model", "file", "name"),
    [
        ("org/name@v1:quants/Model-Q8_0.gguf", "quants/Model-Q8_0.gguf", "model-q8_0"),
        (f"org/name/{GGUF}", GGUF, "model-q4_k_m"),
    ],
)
def test_a_gguf_file_is_downloaded_alone_and_once(model, file, name, tmp_path):
    requested = set()
    with fake_hub(requested) as endpoint:
        done = resolved_elsewhere(model, endpoint, tmp_path)
        assert done.returncode == 0, done.stderr
        assert requested == {file}
        requested.clear()
        assert resolved_elsewhere(model, endpoint, tmp_path).stdout == done.stdout
        assert not requested
    served, path = done.stdout.split()
    assert served == name
    assert path.endswith(f"{COMMIT}/{file}")
    assert Path(path).read_bytes() == FILES[file]


def test_a_gguf_file_that_is_not_there_is_told_with_those_that_are(tmp_path):
    """A part of a model in several files is refused before anything is asked for."""
    requested = set()
    with fake_hub(requested) as endpoint:
        absent = resolved_elsewhere("org/name@v1:Model-Q2_K.gguf", endpoint, tmp_path)
        part = resolved_elsewhere("org/name:Model-F16-00001-of-00002.gguf", endpoint, tmp_path)
    assert (absent.returncode, part.returncode) == (1, 1)
    told = (
        "model org/name@v1:Model-Q2_K.gguf: its repository holds no Model-Q2_K.gguf; "
        f"it holds {GGUF}, quants/Model-Q8_0.gguf: name one, org/name:FILE.gguf"
    )
    assert absent.stderr.strip().splitlines()[-1] == told
    assert "one part of a model in several files" in part.stderr
    assert "Traceback" not in absent.stderr + part.stderr
    assert not requested


def test_a_repository_of_gguf_files_alone_is_told_with_them(monkeypatch, tmp_path):
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    siblings = [SimpleNamespace(rfilename=name) for name in ("a.gguf", "README.md")]
    monkeypatch.setattr(hub, "model_info", lambda *_, **__: SimpleNamespace(siblings=siblings))
    with pytest.raises(ModelSourceError, match=r"no \.safetensors .* it holds a\.gguf: name one"):
        resolve_model("org/name", quiet)


def test_offline_and_unknown_repositories_are_said_in_one_line(tmp_path):
    with fake_hub(set()) as endpoint:
        unknown = resolved_elsewhere("org/other", endpoint, tmp_path)
    offline = resolved_elsewhere("org/name", endpoint, tmp_path)
    for failed, name in ((unknown, "org/other"), (offline, "org/name")):
        assert failed.returncode == 1
        last = failed.stderr.strip().splitlines()[-1]
        assert last.startswith(f"model {name}: the hub gave no files: ")
        assert "Traceback" not in failed.stderr
