"""The user's own key: made once, mode 600, never told to the router."""

import os
import stat
import threading
import tomllib

import pytest

from noria.cli.keys import KEYS_FILE, ensure_key, ensure_keys_file
from noria.client.connection import find_api_key
from noria.service.api_key import key_sha256


@pytest.fixture
def key_file(tmp_path):
    return tmp_path / "config" / "api-key"


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_first_run_makes_a_key_that_later_runs_and_clients_read(key_file):
    key = ensure_key()
    assert len(key) >= 40
    assert ensure_key() == key == find_api_key(None, "localhost:50051")
    assert mode(key_file) == 0o600
    assert mode(key_file.parent) == 0o700
    assert [path.name for path in key_file.parent.iterdir()] == ["api-key"]


def test_a_key_file_is_private_whatever_the_umask(key_file):
    before = os.umask(0)
    try:
        ensure_key()
    finally:
        os.umask(before)
    assert mode(key_file) == 0o600


def test_a_file_that_others_could_read_is_made_private(key_file):
    ensure_key()
    key_file.chmod(0o644)
    ensure_key()
    assert mode(key_file) == 0o600


def test_runs_that_start_together_share_one_key():
    start, keys = threading.Barrier(8), []

    def first_run():
        start.wait()
        keys.append(ensure_key())

    threads = [threading.Thread(target=first_run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1


@pytest.mark.parametrize("content", [b"", b"\n", b"two words\n", b"\xff\xfe", b"a\nb\n"])
def test_a_damaged_file_is_named_and_left_as_it_is(key_file, content):
    key_file.parent.mkdir()
    key_file.write_bytes(content)
    with pytest.raises(ValueError, match="api-key"):
        ensure_key()
    assert key_file.read_bytes() == content


def test_the_environment_comes_first_and_makes_no_file(key_file, monkeypatch):
    monkeypatch.setenv("NORIA_API_KEY", "mine")
    assert ensure_key() == "mine"
    assert not key_file.exists()


def test_a_key_in_the_environment_that_no_header_carries_is_refused(monkeypatch):
    monkeypatch.setenv("NORIA_API_KEY", "café")
    with pytest.raises(ValueError, match="NORIA_API_KEY"):
        ensure_key()


def test_the_hash_is_sha256_in_hex():
    assert key_sha256("abc").startswith("ba7816bf8f01cfea414140de5dae2223")


def test_the_routers_file_holds_the_hash_alone_and_is_private(key_file):
    key = ensure_key()
    path = ensure_keys_file(key)
    assert path == key_file.parent / KEYS_FILE
    assert mode(path) == 0o600
    assert key not in path.read_text()
    (tenant,) = tomllib.loads(path.read_text())["tenants"]
    assert [made["sha256"] for made in tenant["keys"]] == [key_sha256(key)]


def test_what_was_added_to_the_routers_file_stays(key_file):
    path = ensure_keys_file(ensure_key())
    added = path.read_text() + '[[tenants]]\nname = "other"\n'
    path.write_text(added)
    path.chmod(0o644)
    assert ensure_keys_file(ensure_key()) == path
    assert path.read_text() == added
    assert mode(path) == 0o600


def test_a_routers_file_of_another_key_is_named_and_left_as_it_is(key_file):
    path = ensure_keys_file(ensure_key())
    before = path.read_text()
    with pytest.raises(ValueError, match=r"keys\.toml lacks the hash"):
        ensure_keys_file("another")
    assert path.read_text() == before


def test_a_key_of_the_environment_is_written_nowhere(key_file, monkeypatch):
    monkeypatch.setenv("NORIA_API_KEY", "mine")
    assert ensure_keys_file(ensure_key()) is None
    assert not key_file.parent.exists()
