"""A model's files: known by name, by path or by the hub's name."""

from pathlib import Path

import pytest

from noria.cli.model_source import ModelSourceError, models_dir, resolve_model


def never(_line):
    raise AssertionError("nothing is to be downloaded")


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


@pytest.mark.parametrize("name", ["nothing-of-that-name", "./a/b/c.gguf", "/no.gguf", "../x", ""])
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
