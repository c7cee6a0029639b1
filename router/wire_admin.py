"""Tenants and keys on the wire, and checks of what operators send."""

from collections.abc import Iterable

from noria.reasons import RequestError, invalid_field
from noria.service.limits import (
    MAX_CERTIFICATE_NAME_BYTES,
    MAX_KEY_LABEL_BYTES,
    MAX_MODEL_NAME_BYTES,
    MAX_PRIORITY,
    MAX_SCOPE_NAMES,
    MIN_PRIORITY,
)
from noria.v1 import admin_pb2, chat_pb2
from router.auth import Tenant
from router.keys_format import TENANT_NAME
from router.store.keys import KeyChange, KeyRecord
from router.tenant_limits import LIMIT_FIELDS, TenantLimits

METHODS = frozenset(chat_pb2.DESCRIPTOR.services_by_name["ChatService"].methods_by_name)
MAX_EXPIRY_MS = 100 * 365 * 24 * 3600 * 1000


def checked_tenant(request: admin_pb2.SetTenantRequest) -> Tenant:
    """Raises INVALID_FIELD."""
    scope = request.scope
    ceiling = scope.priority_ceiling if scope.HasField("priority_ceiling") else MAX_PRIORITY
    if not MIN_PRIORITY <= ceiling <= MAX_PRIORITY:
        problem = f"{ceiling}; from {MIN_PRIORITY} to {MAX_PRIORITY}"
        raise invalid_field("scope.priority_ceiling", problem)
    if scope.cache_group and not TENANT_NAME.fullmatch(scope.cache_group):
        raise _no_name("scope.cache_group")
    return Tenant(
        _checked_name("name", request.name),
        models=_names(scope, "models"),
        methods=_methods(scope),
        priority_ceiling=ceiling,
        cache_group=scope.cache_group,
        limits=_limits(scope),
        admin=scope.admin,
    )


def checked_label(label: str) -> str:
    size = len(label.encode())
    if size > MAX_KEY_LABEL_BYTES or not label.isprintable():
        problem = f"{size} bytes; at most {MAX_KEY_LABEL_BYTES}, all of them printable"
        raise invalid_field("label", problem)
    return label


def checked_certificate(name: str) -> str:
    """A certificate's name, or nothing. Raises INVALID_FIELD."""
    size = len(name.encode())
    if size > MAX_CERTIFICATE_NAME_BYTES or not name.isprintable():
        problem = f"{size} bytes; at most {MAX_CERTIFICATE_NAME_BYTES}, all of them printable"
        raise invalid_field("certificate", problem)
    return name


def checked_expiry(
    request: admin_pb2.CreateKeyRequest | admin_pb2.ExpireKeyRequest,
) -> float | None:
    """Seconds from now; None: never. Raises INVALID_FIELD."""
    if not request.HasField("expires_in_ms"):
        return None
    if not 0 <= request.expires_in_ms <= MAX_EXPIRY_MS:
        problem = f"{request.expires_in_ms}; from 0 to {MAX_EXPIRY_MS}"
        raise invalid_field("expires_in_ms", problem)
    return request.expires_in_ms / 1000


def key(record: KeyRecord, now: float) -> admin_pb2.Key:
    return admin_pb2.Key(
        key_id=record.key_id,
        tenant=record.tenant,
        label=record.label,
        created_unix_us=_microseconds(record.created_at),
        expires_unix_us=_microseconds(record.expires_at),
        revoked_unix_us=_microseconds(record.revoked_at),
        live=record.is_live(now),
    )


def tenant(told: Tenant) -> admin_pb2.Tenant:
    limits = {name: getattr(told.limits, name) for name in LIMIT_FIELDS}
    scope = admin_pb2.TenantScope(
        models=_wire_names(told.models),
        methods=_wire_names(told.methods),
        priority_ceiling=told.priority_ceiling,
        cache_group=told.cache_group,
        admin=told.admin,
        **limits,
    )
    return admin_pb2.Tenant(name=told.name, scope=scope)


def key_change(change: KeyChange) -> admin_pb2.KeyChange:
    return admin_pb2.KeyChange(
        unix_us=round(change.at * 1e6),
        by=change.by,
        action=change.action,
        tenant=change.tenant,
        key_id=change.key_id,
    )


def _checked_name(field: str, name: str) -> str:
    if not TENANT_NAME.fullmatch(name):
        raise _no_name(field)
    return name


def _no_name(field: str) -> RequestError:
    return invalid_field(field, "1 to 64 letters, digits, '.', '_' or '-' are needed")


def _names(scope: admin_pb2.TenantScope, field: str) -> frozenset[str] | None:
    if not scope.HasField(field):  # type: ignore[arg-type]
        return None
    names: Iterable[str] = getattr(scope, field).names
    told = frozenset(names)
    if len(told) > MAX_SCOPE_NAMES:
        raise invalid_field(f"scope.{field}", f"{len(told)} names; at most {MAX_SCOPE_NAMES}")
    longest = max((len(name.encode()) for name in told), default=1)
    if longest > MAX_MODEL_NAME_BYTES or "" in told:
        problem = f"a name of {longest} bytes, or an empty one; from 1 to {MAX_MODEL_NAME_BYTES}"
        raise invalid_field(f"scope.{field}", problem)
    return told


def _methods(scope: admin_pb2.TenantScope) -> frozenset[str] | None:
    names = _names(scope, "methods")
    if names is not None and not names <= METHODS:
        problem = f"an unknown one; there are {', '.join(sorted(METHODS))}"
        raise invalid_field("scope.methods", problem)
    return names


def _limits(scope: admin_pb2.TenantScope) -> TenantLimits:
    present = {name: getattr(scope, name) for name in LIMIT_FIELDS if scope.HasField(name)}  # type: ignore[arg-type]
    try:
        return TenantLimits(**present)
    except ValueError as error:
        field, _, problem = str(error).partition(": ")
        raise invalid_field(f"scope.{field}", problem) from None


def _wire_names(names: frozenset[str] | None) -> admin_pb2.Names | None:
    return None if names is None else admin_pb2.Names(names=sorted(names))


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)
