"""Keys are compared by digest; whatever is wrong, the answer is the same."""

import hashlib

import pytest

from noria.reasons import Reason, RequestError
from router import auth
from router.auth import ApiKey, KeyRing, Tenant, certificate_sha256


def ring(now=0.0, **keys):
    """Keys by their own text, each of a tenant of that name."""
    digests = {hashlib.sha256(key.encode()).hexdigest(): made for key, made in keys.items()}
    return KeyRing(digests, lambda: now)


ALICE, BOB = Tenant("alice"), Tenant("bob")
RING = ring(alice=ApiKey(ALICE), bob=ApiKey(BOB), off=ApiKey(BOB, disabled=True))


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
    assert RING.authenticate(metadata).tenant == BOB


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
        [("x-api-key", "off")],
        [("authorization", "Bearer off")],
        [("x-api-key", "0" * 64)],
    ],
)
def test_anything_else_is_the_same_refusal(metadata):
    """SEC-01."""
    with pytest.raises(RequestError) as caught:
        RING.authenticate(metadata)
    assert caught.value.reason is Reason.INVALID_KEY
    assert caught.value.message == "the API key is missing, unknown or malformed"


def test_a_key_is_void_from_the_second_on_at_which_it_expires():
    bound = [("x-api-key", "bob")]
    assert ring(now=99.9, bob=ApiKey(BOB, expires_at=100)).authenticate(bound).tenant == BOB
    for now in (100, 101):
        with pytest.raises(RequestError, match="missing, unknown or malformed"):
            ring(now=now, bob=ApiKey(BOB, expires_at=100)).authenticate(bound)


def test_replaced_keys_hold_from_the_next_call_on():
    keys = ring(alice=ApiKey(ALICE))
    keys.replace({hashlib.sha256(b"bob").hexdigest(): ApiKey(BOB)})
    assert keys.authenticate([("x-api-key", "bob")]).tenant == BOB
    with pytest.raises(RequestError):
        keys.authenticate([("x-api-key", "alice")])


@pytest.mark.parametrize("key", ["bob", "off", "aob", "boa", "", "x" * 10_000])
def test_known_unknown_and_void_keys_cost_one_digest_and_one_comparison(key, monkeypatch):
    """SEC-02: the work does not depend on which keys exist, so that its time tells nothing
    of them.
    """
    compared = []
    real = auth.hmac.compare_digest
    monkeypatch.setattr(
        auth.hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or real(a, b)
    )
    try:
        RING.authenticate([("x-api-key", key)])
    except RequestError:
        assert key != "bob"
    assert compared == [(64, 64)]


def test_a_tenant_bound_to_methods_may_call_no_others():
    tenant = Tenant("t", methods=frozenset({"Chat"}))
    tenant.check_method("Chat")
    with pytest.raises(RequestError, match="may not call StreamChat") as caught:
        tenant.check_method("StreamChat")
    assert caught.value.reason is Reason.METHOD_FORBIDDEN
    BOB.check_method("StreamChat")


def certified(**tenants):
    return KeyRing({certificate_sha256(n): ApiKey(t) for n, t in tenants.items()}, lambda: 0.0)


CERTIFIED = certified(a=ALICE, a2=ALICE, b=BOB)


@pytest.mark.parametrize("names", [("a",), ("other", "a"), ("a", "a2")])
def test_a_call_without_a_key_is_known_by_its_certificate(names):
    assert CERTIFIED.authenticate([("user-agent", "x")], names).tenant == ALICE


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        ([], ("A",)),
        ([], ("a", "b")),
        ([], (certificate_sha256("a"),)),
        ([], (*map(str, range(64)), "a")),
        ([("x-api-key", "wrong")], ("a",)),
        ([("authorization", "")], ("a",)),
        ([("x-api-key", "certificate\0a")], ()),
        ([("authorization", b"Bearer certificate\0a")], ()),
        ([("x-api-key", "a")], ()),
    ],
)
def test_a_certificate_of_two_tenants_or_beside_a_wrong_key_is_nobodys(metadata, names):
    """Nor does any key stand for a certificate."""
    with pytest.raises(RequestError) as caught:
        CERTIFIED.authenticate(metadata, names)
    assert caught.value.message == "the API key is missing, unknown or malformed"


def test_of_a_certificates_names_one_that_is_known_is_enough_to_tell():
    assert CERTIFIED.can_tell([], ("other", "b"))
    assert not CERTIFIED.can_tell([], ("other",))
    assert CERTIFIED.can_tell([], ())
