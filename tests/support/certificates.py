"""Certificates for tests: an authority, and the files of every service of a fleet."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from noria import Tls
from noria.service.tls_files import TlsFiles

HOSTS = ("localhost", "127.0.0.1")


def chain(cert):
    return b"".join(blob.bytes() for blob in cert.cert_chain_pems)


def write(folder: Path, name, cert, authority):
    """NAME.pem, NAME.key and NAME-ca.pem, each replaced whole."""
    contents = {
        f"{name}.pem": chain(cert),
        f"{name}.key": cert.private_key_pem.bytes(),
        f"{name}-ca.pem": authority.cert_pem.bytes(),
    }
    for file, content in contents.items():
        fresh = folder / f".{file}"
        fresh.write_bytes(content)
        fresh.replace(folder / file)


def expiring_in(authority, **left):
    """A certificate that is valid for so long from now on."""
    return authority.issue_cert(*HOSTS, not_after=datetime.now(UTC) + timedelta(**left))


def identified(authority, uri):
    """A certificate whose only name is a URI, as SPIFFE has it: its chain and key, in PEM."""
    issuer = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
    signing = serialization.load_pem_private_key(authority.private_key_pem.bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=True
        )
        .sign(signing, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return made.public_bytes(pem), key.private_bytes(pem, *private)


class Fleet:
    """Two authorities: one for the services among themselves, one for clients and the router.

    `renew` makes both anew and writes all files again, in place; one file after the other.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.renew()
        inner, outer = self.file("inner-ca.pem"), self.file("outer-ca.pem")
        self.service = TlsFiles(inner, self.file("inner.pem"), self.file("inner.key"))
        self.peers = TlsFiles(inner, self.file("inner.pem"), self.file("inner.key"))
        self.router = TlsFiles(outer, self.file("outer.pem"), self.file("outer.key"))

    def file(self, name) -> Path:
        return self.folder / name

    def renew(self, inner_hosts=HOSTS):
        self.inner_ca, self.outer_ca = trustme.CA(), trustme.CA()
        self.renew_leaves(inner_hosts)

    def renew_leaves(self, inner_hosts=HOSTS):
        """Certificates and keys of the services anew, from the same authorities."""
        write(self.folder, "inner", self.inner_ca.issue_cert(*inner_hosts), self.inner_ca)
        write(self.folder, "outer", self.outer_ca.issue_cert(*HOSTS), self.outer_ca)

    def client(self, name="team-a.internal", *, of=None) -> Tls:
        """A client with a certificate of its own, from the clients' authority or another."""
        write(self.folder, name, (of or self.outer_ca).issue_cert(name), self.outer_ca)
        ca = self.file(f"{name}-ca.pem")
        return Tls(ca, self.file(f"{name}.pem"), self.file(f"{name}.key"))

    def client_of_uri(self, uri) -> Tls:
        """A client whose certificate bears this URI."""
        cert, key = self.file("uri.pem"), self.file("uri.key")
        for file, content in zip((cert, key), identified(self.outer_ca, uri), strict=True):
            file.write_bytes(content)
        return Tls(self.file("outer-ca.pem"), cert, key)
