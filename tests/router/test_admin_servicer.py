"""What operators may call, what they are answered, and what is told of it."""

import json

import grpc
import pytest
import structlog

from noria.reasons import Reason
from noria.v1 import admin_pb2, admin_pb2_grpc
from tests.router.fakes import bearer, events, failure, routed
from tests.router.test_tenants import DIGEST

KEYS = f"""
[[tenants]]
name = "operators"
admin = true
[[tenants.keys]]
sha256 = "{DIGEST["all"]}"

[[tenants]]
name = "others"
[[tenants.keys]]
sha256 = "{DIGEST["small"]}"
"""
METHODS = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods_by_name


@pytest.fixture
async def router(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    async with routed(api_key_sha256="", keys_file=path, keys_poll_s=0.01) as setup:
        setup.worker.auto = [10]
        yield setup


@pytest.fixture
async def call(router):
    async with grpc.aio.insecure_channel(router.router.address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)

        def call(method, key="all", **fields):
            request = getattr(admin_pb2, f"{method}Request")(**fields)
            return getattr(stub, method)(request, metadata=bearer(key), timeout=10)

        yield call


@pytest.mark.parametrize("method", METHODS)
async def test_no_method_answers_without_the_scope(call, method):
    """SEC-03: neither without a key nor with one that is no administrator's."""
    code, error = await failure(call(method, key="unknown"))
    assert (code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, Reason.INVALID_KEY)
    code, error = await failure(call(method, key="small"))
    assert (code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, Reason.METHOD_FORBIDDEN)


async def test_a_key_made_here_serves_and_every_change_is_told_without_it(router, call):
    with structlog.testing.capture_logs() as lines:
        await call("SetTenant", name="new")
        made = await call("CreateKey", tenant="new", label="ci", expires_in_ms=60_000)
        await events(router.stream(key=made.api_key))
        await call("RevokeKey", key_id=made.key.key_id)
    assert made.until_router_stops
    assert (made.key.tenant, made.key.label, made.key.live) == ("new", "ci", True)
    changes = [line for line in lines if line["event"] == "key_changed"]
    assert [line["action"] for line in changes] == ["set_tenant", "create", "revoke"]
    assert {line["by"] for line in changes} == {f"key-{DIGEST['all'][:16]}"}
    assert changes[1]["key_id"] == made.key.key_id
    assert made.api_key not in json.dumps(lines, default=str)
    told = (await call("ListKeyChanges", limit=2)).changes
    assert [each.action for each in told] == ["revoke", "create"]


async def test_what_was_set_is_listed(call):
    scope = admin_pb2.TenantScope(
        models=admin_pb2.Names(names=["b", "a"]),
        methods=admin_pb2.Names(),
        priority_ceiling=-5,
        cache_group="g",
        admin=True,
        tokens_per_minute=9,
        queue_share=0.5,
    )
    await call("SetTenant", name="new", scope=scope)
    await call("CreateKey", tenant="new", expires_in_ms=0)
    listed = await call("ListKeys", tenant="new")
    scope.models.names[:] = ["a", "b"]
    assert [(each.name, each.scope) for each in listed.tenants] == [("new", scope)]
    assert list(listed.keys) == []
    listed = await call("ListKeys", tenant="new", include_void=True)
    assert [key.live for key in listed.keys] == [False]
    everybody = (await call("ListKeys")).tenants
    assert [each.name for each in everybody] == ["new", "operators", "others"]


@pytest.mark.parametrize(
    ("method", "fields", "named"),
    [
        ("SetTenant", {"name": ""}, "name"),
        ("SetTenant", {"name": "a b"}, "name"),
        ("SetTenant", {"name": "x" * 65}, "name"),
        ("SetTenant", {"name": "others"}, "tenant"),
        ("SetTenant", {"scope": {"priority_ceiling": 101}}, "scope.priority_ceiling"),
        ("SetTenant", {"scope": {"methods": {"names": ["Nope"]}}}, "scope.methods"),
        ("SetTenant", {"scope": {"models": {"names": [""]}}}, "scope.models"),
        ("SetTenant", {"scope": {"models": {"names": map(str, range(257))}}}, "scope.models"),
        ("SetTenant", {"scope": {"requests_per_minute": 0}}, "scope.requests_per_minute"),
        ("SetTenant", {"scope": {"queue_share": 1.5}}, "scope.queue_share"),
        ("SetTenant", {"scope": {"queue_share": float("nan")}}, "scope.queue_share"),
        ("SetTenant", {"scope": {"cache_group": "a b"}}, "scope.cache_group"),
        ("CreateKey", {"tenant": "nobody"}, "tenant"),
        ("CreateKey", {"tenant": "others"}, "tenant"),
        ("CreateKey", {"tenant": "others", "label": "x" * 65}, "label"),
        ("CreateKey", {"tenant": "others", "label": "a\nb"}, "label"),
        ("CreateKey", {"tenant": "others", "expires_in_ms": -1}, "expires_in_ms"),
        ("ExpireKey", {"key_id": "x", "expires_in_ms": 2**62}, "expires_in_ms"),
        ("RevokeKey", {"key_id": f"key-{DIGEST['small'][:16]}"}, "key_id"),
        ("CreateKey", {"tenant": "others", "certificate": "x" * 257}, "certificate"),
        ("CreateKey", {"tenant": "others", "certificate": "a\0b"}, "certificate"),
        ("ListKeyChanges", {"limit": 0}, "limit"),
        ("ListRequests", {"limit": 0}, "limit"),
        ("ListRequests", {"limit": 10_001}, "limit"),
        ("DrainWorker", {"worker_id": "nowhere"}, "worker_id"),
    ],
)
async def test_bad_input_is_named(call, method, fields, named):
    """What stands in the keys file is changed there and not here."""
    given = {"name": "good", **fields} if method == "SetTenant" else fields
    code, error = await failure(call(method, **given))
    assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD)
    assert [field for field, _ in error.fields] == [named]


async def test_an_unknown_key_is_not_found(call):
    for method in ("RevokeKey", "ExpireKey"):
        code, error = await failure(call(method, key_id="key-none"))
        assert (code, error.reason) == (grpc.StatusCode.NOT_FOUND, Reason.KEY_NOT_FOUND)


async def test_a_third_key_is_refused_by_name(call):
    await call("SetTenant", name="new")
    made = [await call("CreateKey", tenant="new") for _ in range(2)]
    code, error = await failure(call("CreateKey", tenant="new"))
    assert (code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.TOO_MANY_KEYS)
    assert all(each.key.key_id in error.message for each in made)
