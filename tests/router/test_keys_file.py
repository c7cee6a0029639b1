"""A keys file is read when it changes, whatever happens to it."""

import os
from hashlib import sha256

import pytest

from router.keys_file import KeysFile
from router.keys_format import KeysFormatError

A, B = sha256(b"a").hexdigest(), sha256(b"b").hexdigest()


def content(digest):
    return f'[[tenants]]\nname = "t"\n[[tenants.keys]]\nsha256 = "{digest}"\n'


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(content(A))
    return path


def replace(path, text):
    """As it should be done: a new file takes the place of the old one."""
    fresh = path.with_name("fresh")
    fresh.write_text(text)
    fresh.replace(path)


def test_it_is_read_once_until_it_is_replaced(path):
    file = KeysFile(path, frozenset())
    assert list(file.poll()) == [A]
    assert file.poll() is None
    replace(path, content(B))
    assert list(file.poll()) == [B]
    assert file.poll() is None


def test_a_replacement_of_the_same_size_and_time_is_noticed(path):
    file = KeysFile(path, frozenset())
    file.poll()
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    replace(path, content(B))
    os.utime(path, ns=times)
    assert list(file.poll()) == [B]


def test_a_link_that_points_elsewhere_is_noticed(path):
    """Mounted secrets are replaced by turning a link."""
    other, link = path.with_name("other"), path.with_name("link")
    other.write_text(content(B))
    link.symlink_to(path)
    file = KeysFile(link, frozenset())
    file.poll()
    link.unlink()
    link.symlink_to(other)
    assert list(file.poll()) == [B]


def test_a_broken_state_is_told_once_and_a_good_one_is_read_again(path):
    file = KeysFile(path, frozenset())
    file.poll()
    for state in ("[[tenants", "", "[[tenants]]\nname = 3"):
        replace(path, state)
        with pytest.raises(KeysFormatError):
            file.poll()
        assert file.poll() is None
    replace(path, content(A))
    assert list(file.poll()) == [A]


def test_a_file_that_is_gone_is_told_once_and_read_when_it_is_back(path):
    file = KeysFile(path, frozenset())
    file.poll()
    path.unlink()
    with pytest.raises(KeysFormatError, match="cannot be read: No such file"):
        file.poll()
    assert file.poll() is None
    path.write_text(content(A))
    assert list(file.poll()) == [A]
