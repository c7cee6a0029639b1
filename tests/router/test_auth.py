"""Keys are compared by digest; whatever is wrong, the answer is the same."""

import hashlib

import pytest

from noria.reasons import Reason, RequestError
from router.auth import KeyRing, Tenant

RING = KeyRing({hashlib.sha256(key.encode()).hexdigest(): Tenant(key) for key in ("alice", "bob")})


@pytest.mark.parametrize(
    "metadata",
    [
        [("authorization", "Bearer bob")],
        [("authorization", "bEARER bob"), ("user-agent", "x")],
        [("x-api-key", "bob")],
        [("x-api-key", b"bob")],
        [("x-api-key", "bob"), ("authorization", "Bearer bob")],
    ],
)
def test_a_known_key_gives_its_tenant(metadata):
    assert RING.authenticate(metadata) == Tenant("bob")


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer  bob")],
        [("authorization", "Bearer Bob")],
        [("authorization", "bob")],
        [("authorization", "Basic bob")],
        [("authorization", "Bearer caf\u00e9")],
        [("authorization", b"Bearer caf\xe9")],
        [("x-api-key", "\u201cbob\u201d")],
        [("x-api-key", "bob\0")],
        [("x-api-key", "\udce9")],
        [("x-api-key", "b" * 100_000)],
        [("x-api-key", hashlib.sha256(b"bob").hexdigest())],
        [("x-api-key", "alice"), ("authorization", "Bearer bob")],
        [("authorization", "Bearer alice"), ("authorization", "Bearer bob")],
        [("x-api-key", "bob"), ("authorization", "Basic bob")],
    ],
)
def test_anything_else_is_the_same_refusal(metadata):
    with pytest.raises(RequestError) as caught:
        RING.authenticate(metadata)
    assert caught.value.reason is Reason.INVALID_KEY
    assert caught.value.message == "the API key is missing, unknown or malformed"
