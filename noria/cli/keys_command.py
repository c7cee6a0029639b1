"""`noria keys`: who may call, and with which key."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import click

from noria.cli.administering import ADDRESS, administering, columns
from noria.cli.terminal import tell
from noria.client.tls import Tls
from noria.v1 import admin_pb2

_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_URL = "NORIA_ROUTER_REDIS_URL"


class _Duration(click.ParamType[int]):
    """A time such as 90d, 12h, 30m or 45s, in milliseconds."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        found = re.fullmatch(r"([0-9]{1,9})([smhd])", value) if isinstance(value, str) else None
        if found is None:
            self.fail("a number and s, m, h or d is needed, as 90d", param, ctx)
        return int(found[1]) * _MS[found[2]]


@click.group()
def keys() -> None:
    """Make, list and end keys. Needs a key whose tenant is an administrator."""


@keys.command("init")
@click.option("--redis-url", help=f"The routers' own; rather set {_URL}, it may hold a password.")
def init(redis_url: str | None) -> None:
    """Make the first administrator's key, in Redis itself, and print it."""
    url = redis_url or os.environ.get(_URL, "")
    if not url:
        raise click.UsageError(f"--redis-url: none; it or {_URL} is needed")
    if any(importlib.util.find_spec(name) is None for name in ("redis", "structlog")):
        raise click.ClickException('packages are missing: pip install "noria[router]"')
    # Not on the command line, where others could read it.
    environment = {**os.environ, _URL: url}
    argv = (sys.executable, "-P", "-m", "router.first_key")
    sys.exit(subprocess.run(argv, env=environment, check=False).returncode)


@keys.command("tenant")
@click.argument("name")
@click.option("--model", "models", multiple=True, help="It may ask for; repeatable. None: all.")
@click.option("--method", "methods", multiple=True, help="It may call; repeatable. None: all.")
@click.option("--priority-ceiling", type=int, help="Caps its requests' priority.")
@click.option("--cache-group", default="", help="Shares cached prefixes with these tenants.")
@click.option("--admin", is_flag=True, help="May administer.")
@click.option("--requests-per-minute", type=int, help="That may begin.")
@click.option("--tokens-per-minute", type=int, help="Of prompts and answers.")
@click.option("--concurrent-requests", type=int, help="At the same time.")
@click.option("--concurrent-encodes", type=int, help="At the same time.")
@click.option("--queue-share", type=float, help="The part of each queue, up to 1.")
@ADDRESS
@click.pass_obj
def tenant(
    tls: Tls | None,
    /,
    name: str,
    address: str,
    models: tuple[str, ...],
    methods: tuple[str, ...],
    **scope: Any,
) -> None:
    """Make a tenant, or give it another scope: all of it is as said here."""
    given = {field: value for field, value in scope.items() if value is not None}
    request = admin_pb2.SetTenantRequest(name=name, scope=admin_pb2.TenantScope(**given))
    for field, names in (("models", models), ("methods", methods)):
        if names:
            getattr(request.scope, field).names.extend(names)
    with administering(address, tls) as client:
        client.call(client.stub.SetTenant, request)


@keys.command("create")
@click.argument("tenant")
@click.option("--label", default="", help="For people.")
@click.option("--expires-in", type=_Duration(), help="For example 90d. Default: never.")
@click.option("--certificate", default="", help="A name in client certificates, in place of a key.")
@ADDRESS
@click.pass_obj
def create(
    tls: Tls | None,
    /,
    tenant: str,
    label: str,
    expires_in: int | None,
    certificate: str,
    address: str,
) -> None:
    """Make a key for TENANT and print it, this once."""
    request = admin_pb2.CreateKeyRequest(
        tenant=tenant, label=label, expires_in_ms=expires_in, certificate=certificate
    )
    with administering(address, tls) as client:
        made = client.call(client.stub.CreateKey, request)
    tell(f"{made.key.key_id} of {made.key.tenant}: {_state(made.key)}")
    if made.until_router_stops:
        tell("this router has no Redis: the key is gone when it stops")
    if made.api_key:
        click.echo(made.api_key)


@keys.command("list")
@click.option("--tenant", default="", help="Its alone.")
@click.option("--all", "include_void", is_flag=True, help="Also revoked and expired ones.")
@ADDRESS
@click.pass_obj
def list_keys(tls: Tls | None, /, tenant: str, include_void: bool, address: str) -> None:
    """List keys: one a line."""
    request = admin_pb2.ListKeysRequest(tenant=tenant, include_void=include_void)
    with administering(address, tls) as client:
        listed = client.call(client.stub.ListKeys, request)
    admins = {each.name for each in listed.tenants if each.scope.admin}
    rows = [
        (key.tenant, key.key_id, _state(key), "admin" if key.tenant in admins else "", key.label)
        for key in listed.keys
    ]
    click.echo(columns(("TENANT", "KEY", "STATE", "SCOPE", "LABEL"), rows))


@keys.command("tenants")
@ADDRESS
@click.pass_obj
def tenants(tls: Tls | None, /, address: str) -> None:
    """List tenants and what they may do: one a line."""
    with administering(address, tls) as client:
        listed = client.call(client.stub.ListKeys, admin_pb2.ListKeysRequest())
    live = Counter(key.tenant for key in listed.keys)
    rows = [(each.name, str(live[each.name]), _scope(each.scope)) for each in listed.tenants]
    click.echo(columns(("TENANT", "KEYS", "SCOPE"), rows))


@keys.command("revoke")
@click.argument("key_id")
@ADDRESS
@click.pass_obj
def revoke(tls: Tls | None, /, key_id: str, address: str) -> None:
    """End a key for good, and what it runs."""
    with administering(address, tls) as client:
        request = admin_pb2.RevokeKeyRequest(key_id=key_id)
        key = client.call(client.stub.RevokeKey, request).key
    tell(f"{key.key_id} of {key.tenant}: {_state(key)}")


@keys.command("expire")
@click.argument("key_id")
@click.option("--in", "in_ms", type=_Duration(), help="For example 1h; 0s: at once.")
@click.option("--never", is_flag=True, help="Take an expiry back.")
@ADDRESS
@click.pass_obj
def expire(tls: Tls | None, /, key_id: str, in_ms: int | None, never: bool, address: str) -> None:
    """Say when a key ends; what it runs then is finished."""
    if never == (in_ms is not None):
        raise click.UsageError("one of --in and --never is needed")
    request = admin_pb2.ExpireKeyRequest(key_id=key_id, expires_in_ms=in_ms)
    with administering(address, tls) as client:
        key = client.call(client.stub.ExpireKey, request).key
    tell(f"{key.key_id} of {key.tenant}: {_state(key)}")


@keys.command("log")
@click.option("--limit", type=int, help="How many lines. Default: 100.")
@ADDRESS
@click.pass_obj
def log(tls: Tls | None, /, limit: int | None, address: str) -> None:
    """Who changed what, newest first."""
    request = admin_pb2.ListKeyChangesRequest(limit=limit)
    with administering(address, tls) as client:
        changes = client.call(client.stub.ListKeyChanges, request).changes
    rows = [(_time(c.unix_us), c.by, c.action, c.tenant, c.key_id) for c in changes]
    click.echo(columns(("TIME", "BY", "ACTION", "TENANT", "KEY"), rows))


def _scope(scope: admin_pb2.TenantScope) -> str:
    """What is set of it, as NAME=VALUE."""
    told = []
    for field, value in scope.ListFields():
        text = ",".join(value.names) or "none" if field.message_type else f"{value}"
        told.append(field.name if value is True else f"{field.name}={text}")
    return " ".join(told)


def _state(key: admin_pb2.Key) -> str:
    if key.HasField("revoked_unix_us"):
        return f"revoked {_time(key.revoked_unix_us)}"
    if not key.live:
        return f"expired {_time(key.expires_unix_us)}" if key.expires_unix_us else "disabled"
    return f"until {_time(key.expires_unix_us)}" if key.HasField("expires_unix_us") else "live"


def _time(unix_us: int) -> str:
    return datetime.fromtimestamp(unix_us / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
