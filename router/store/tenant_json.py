"""A tenant and a key as JSON. Fields that a later version wrote are passed over."""

import json
from dataclasses import asdict
from typing import Any

from router.auth import Tenant
from router.store.keys import KeyRecord
from router.tenant_limits import LIMIT_FIELDS, TenantLimits


def tenant_to_json(tenant: Tenant) -> str:
    told = {
        "name": tenant.name,
        "models": _sorted(tenant.models),
        "methods": _sorted(tenant.methods),
        "priority_ceiling": tenant.priority_ceiling,
        "cache_group": tenant.cache_group,
        "admin": tenant.admin,
        "limits": asdict(tenant.limits),
    }
    return json.dumps(told, separators=(",", ":"))


def tenant_from_json(name: str, text: str) -> Tenant:
    """Raises ValueError or TypeError for what is no tenant of that name: nothing is assumed."""
    told = _object(text)
    limits = told["limits"]
    if told["name"] != name or not isinstance(limits, dict):
        raise ValueError("not the tenant of this name")
    return Tenant(
        name,
        models=_names(told["models"]),
        methods=_names(told["methods"]),
        priority_ceiling=_exactly(int, told["priority_ceiling"]),
        cache_group=_exactly(str, told["cache_group"]),
        limits=TenantLimits(**{field: limits.get(field) for field in LIMIT_FIELDS}),
        admin=_exactly(bool, told["admin"]),
    )


def key_from_json(key_id: str, text: str) -> KeyRecord:
    """Times are milliseconds there. Raises ValueError or TypeError for what is no such key."""
    told = _object(text)
    if told["key_id"] != key_id:
        raise ValueError("not the key of this id")
    return KeyRecord(
        key_id,
        _exactly(str, told["sha256"]),
        _exactly(str, told["tenant"]),
        _exactly(str, told.get("label", "")),
        created_at=_seconds(told.get("created_ms")),
        expires_at=_seconds(told.get("expires_ms")),
        revoked_at=_seconds(told.get("revoked_ms")),
    )


class _Told(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise ValueError(f"no {name}")


def _object(text: str) -> _Told:
    return _Told(_exactly(dict, json.loads(text)))


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {kind.__name__} is needed")
    return value


def _names(value: Any) -> frozenset[str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("a list of names is needed")
    return frozenset(value)


def _sorted(names: frozenset[str] | None) -> list[str] | None:
    return None if names is None else sorted(names)


def _seconds(milliseconds: Any) -> float | None:
    if milliseconds is None:
        return None
    seconds: float = milliseconds / 1000
    return seconds
