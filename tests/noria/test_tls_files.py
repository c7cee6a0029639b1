"""Certificates and keys that cannot be used are refused by flag and file, and told nothing of."""

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from noria.service import tls_files
from noria.service.tls_files import MAX_BYTES, TlsFileError, TlsFiles, TlsSource
from tests.support.certificates import chain, write

FLAGS = ("tls-client-ca", "tls-cert", "tls-key")


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def folder(tmp_path, authority):
    write(tmp_path, "a", authority.issue_cert("localhost"), authority)
    write(tmp_path, "b", authority.issue_cert("localhost"), authority)
    (tmp_path / "empty.pem").write_bytes(b"")
    (tmp_path / "huge.pem").write_bytes(b"x" * (MAX_BYTES + 1))
    (tmp_path / "binary.pem").write_bytes(b"\xff\x00" * 100)
    key = serialization.load_pem_private_key((tmp_path / "a.key").read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    (tmp_path / "locked.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    )
    return tmp_path


def files(folder, cert="a.pem", key="a.key", ca="a-ca.pem"):
    return TlsFiles(folder / ca, folder / cert, folder / key, flags=FLAGS)


def test_what_belongs_together_is_read(folder):
    material = TlsSource(files(folder)).material
    assert (material.ca, material.cert, material.key) == tuple(
        (folder / name).read_bytes() for name in ("a-ca.pem", "a.pem", "a.key")
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cert": "none.pem"}, "tls-cert: {folder}/none.pem: No such file or directory"),
        ({"key": "none.key"}, "tls-key: {folder}/none.key: No such file or directory"),
        ({"ca": "."}, "tls-client-ca: {folder}: Is a directory"),
        ({"ca": "empty.pem"}, "tls-client-ca: {folder}/empty.pem: no certificates in PEM"),
        ({"cert": "binary.pem"}, "tls-cert: {folder}/binary.pem: no certificates in PEM"),
        ({"cert": "a.key"}, "tls-cert: {folder}/a.key: no certificates in PEM"),
        ({"cert": "huge.pem"}, f"tls-cert: {{folder}}/huge.pem: more than {MAX_BYTES} bytes"),
        ({"key": "b.key"}, "tls-key: {folder}/b.key: not the key of tls-cert {folder}/a.pem"),
        ({"key": "a.pem"}, "tls-key: {folder}/a.pem: no private key in PEM, or an encrypted one"),
        ({"key": "locked.key"}, "tls-key: {folder}/locked.key: no private key in PEM, or an encr"),
    ],
)
def test_what_cannot_be_used_is_refused_by_flag_and_file(folder, given, says):
    with pytest.raises(TlsFileError) as refused:
        TlsSource(files(folder, **given))
    message = str(refused.value)
    assert message.startswith(says.format(folder=folder))
    assert "BEGIN" not in message
    assert "secret" not in message


@pytest.mark.parametrize(("cert", "key"), [("a.pem", None), (None, "a.key")])
def test_a_certificate_needs_its_key_and_a_key_its_certificate(folder, cert, key):
    paths = [None if name is None else folder / name for name in (cert, key)]
    with pytest.raises(TlsFileError, match=r"none; tls-(cert|key) needs it"):
        TlsFiles(None, *paths, flags=FLAGS)


def test_changed_files_are_taken_over_and_unusable_ones_change_nothing(folder, authority):
    """A key that arrives after its certificate is no moment without a certificate."""
    source = TlsSource(files(folder))
    before = source.material
    assert source.poll() is False
    new = authority.issue_cert("localhost")
    (folder / "a.pem").write_bytes(chain(new))
    with pytest.raises(TlsFileError, match="not the key of"):
        source.poll()
    assert source.poll() is False
    assert source.material is before
    (folder / "a.key").unlink()
    with pytest.raises(TlsFileError, match="No such file"):
        source.poll()
    (folder / "a.key").write_bytes(new.private_key_pem.bytes())
    assert source.poll() is True
    assert source.material.cert == chain(new)


def test_files_that_change_while_they_are_read_are_read_again(folder, authority, monkeypatch):
    """Of a certificate from before and a key from after nothing comes into use."""
    source, before = TlsSource(files(folder)), (folder / "a.pem").read_bytes()
    read, new = tls_files.read_material, authority.issue_cert("localhost")

    def changing(paths):
        material = read(paths)
        write(folder, "a", new, authority)
        return material

    write(folder, "a", authority.issue_cert("localhost"), authority)
    monkeypatch.setattr(tls_files, "read_material", changing)
    assert source.poll() is False
    assert source.material.cert == before
    monkeypatch.setattr(tls_files, "read_material", read)
    assert source.poll() is True
    assert source.material.cert == chain(new)
    assert source.poll() is False


def test_no_representation_shows_the_key(folder):
    source = TlsSource(files(folder))
    assert "PRIVATE" not in repr(source.material)
