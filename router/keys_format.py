"""Keys and tenants as TOML; the format stands in docs/operations.md.

Problems are told by their place, never by what stands there: a file of hashes is where
somebody may once paste a key.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any

from noria.service.limits import MAX_CERTIFICATE_NAME_BYTES, MAX_PRIORITY, MIN_PRIORITY
from router.auth import ApiKey, Keys, Tenant, certificate_sha256
from router.tenant_limits import LIMIT_FIELDS, TenantLimits

MAX_BYTES = 16 * 1024 * 1024
_DIGEST = re.compile(r"[0-9a-f]{64}")
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST_OF_NOTHING = sha256(b"").hexdigest()
_TENANT_FIELDS = (
    "name", "models", "methods", "priority_ceiling", "cache_group", "admin", *LIMIT_FIELDS, "keys",
)  # fmt: skip
_KEY_FIELDS = ("sha256", "certificate", "label", "expires", "disabled")


class KeysFormatError(ValueError):
    """A file that cannot be used: why, and on which line, where that is known."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason if line is None else f"line {line}: {reason}")
        self.reason = reason
        self.line = line


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the file and the line of its header, if it has one."""

    fields: dict[str, Any]
    line: int | None

    def fail(self, problem: str) -> KeysFormatError:
        return KeysFormatError(problem, self.line)

    def check_names(self, known: Sequence[str]) -> None:
        # A misspelt `models` must not grant all of them.
        if not self.fields.keys() <= set(known):
            raise self.fail(f"an unknown field; there are {', '.join(known)}")

    def get(self, name: str, kind: type, default: Any) -> Any:
        value = self.fields.get(name, default)
        # By exact type: a bool is an int in Python, and none in TOML.
        if name in self.fields and type(value) is not kind:
            raise self.fail(f"{name}: {type(value).__name__}; {kind.__name__} is needed")
        return value

    def names(self, name: str) -> frozenset[str] | None:
        """A list of strings as a set; None if it is absent."""
        values = self.get(name, list, None)
        if values is None:
            return None
        if not all(isinstance(value, str) for value in values):
            raise self.fail(f"{name}: a list of strings is needed")
        return frozenset(values)

    def tables(self, name: str, lines: Iterator[int | None]) -> Iterator["_Table"]:
        """The tables of a list; each takes the next line."""
        entries = self.get(name, list, [])
        if not all(isinstance(entry, dict) for entry in entries):
            raise self.fail(f"{name}: a list of tables is needed")
        return (_Table(entry, next(lines, None)) for entry in entries)


def parse_keys(content: bytes, methods: frozenset[str]) -> Keys:
    """The keys by digest; `methods` are the known ones. Raises KeysFormatError."""
    text, document = _document(content)
    document.check_names(("tenants",))
    key_lines = _headers(text, "keys")
    keys: dict[str, ApiKey] = {}
    names: set[str] = set()
    for table in document.tables("tenants", _headers(text, "")):
        tenant = _tenant(table, methods)
        if tenant.name in names:
            raise table.fail("name: another tenant has the same")
        names.add(tenant.name)
        for entry in table.tables("keys", key_lines):
            digest = _digest(entry)
            if digest in keys:
                raise entry.fail("sha256: another key has the same")
            keys[digest] = _key(entry, tenant)
    if not keys:
        # Rather a file that is being written than the wish to shut everybody out.
        raise KeysFormatError("there is no key in it")
    return keys


def _document(content: bytes) -> tuple[str, _Table]:
    if len(content) > MAX_BYTES:
        raise KeysFormatError(f"more than {MAX_BYTES} bytes")
    try:
        text = content.decode()
        return text, _Table(tomllib.loads(text), None)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise KeysFormatError("not UTF-8", line) from None
    except tomllib.TOMLDecodeError as error:
        # Its message may quote the file; the line that it names does not. Without one it
        # speaks of the end.
        found = re.search(r"\(at line (\d+), column \d+\)$", str(error))
        last = len(text.splitlines())
        raise KeysFormatError("not TOML", int(found[1]) if found else last) from None
    except RecursionError:
        raise KeysFormatError("nested too deeply") from None
    except ValueError:
        # What tomllib lets through from Python itself, such as a number of too many digits.
        raise KeysFormatError("a value that cannot be read") from None


def _headers(text: str, below: str) -> Iterator[int | None]:
    """Lines of the headers `[[tenants]]`, or of `[[tenants.BELOW]]`, in order.

    None where tables are written in other ways too: which is which could not be told.
    """
    if re.search(r"^\s*(tenants|keys)\s*=", text, re.MULTILINE):
        return iter(())
    name = rf"tenants\s*\.\s*{below}" if below else "tenants"
    header = re.compile(rf"\s*\[\[\s*{name}\s*\]\]")
    return (n for n, line in enumerate(text.splitlines(), 1) if header.match(line))


def _tenant(table: _Table, methods: frozenset[str]) -> Tenant:
    table.check_names(_TENANT_FIELDS)
    name = table.get("name", str, "")
    if not TENANT_NAME.fullmatch(name):
        raise table.fail("name: 1 to 64 letters, digits, '.', '_' or '-' are needed")
    allowed = table.names("methods")
    if allowed is not None and not allowed <= methods:
        raise table.fail(f"methods: an unknown one; there are {', '.join(sorted(methods))}")
    ceiling = table.get("priority_ceiling", int, MAX_PRIORITY)
    if not MIN_PRIORITY <= ceiling <= MAX_PRIORITY:
        raise table.fail(f"priority_ceiling: from {MIN_PRIORITY} to {MAX_PRIORITY}")
    group = table.get("cache_group", str, "")
    admin = table.get("admin", bool, False)
    return Tenant(name, table.names("models"), allowed, ceiling, group, _limits(table), admin)


def _limits(table: _Table) -> TenantLimits:
    values = {name: table.get(name, int, None) for name in LIMIT_FIELDS if name != "queue_share"}
    # The whole queue may be written 1 as well as 1.0.
    share_type = int if type(table.fields.get("queue_share")) is int else float
    try:
        return TenantLimits(**values, queue_share=table.get("queue_share", share_type, None))
    except ValueError as error:
        raise table.fail(str(error)) from None


def _digest(table: _Table) -> str:
    table.check_names(_KEY_FIELDS)
    name = table.get("certificate", str, "")
    if "certificate" in table.fields:
        if "sha256" in table.fields or not 0 < len(name.encode()) <= MAX_CERTIFICATE_NAME_BYTES:
            problem = f"in place of sha256, 1 to {MAX_CERTIFICATE_NAME_BYTES} bytes"
            raise table.fail(f"certificate: {problem} are needed")
        return certificate_sha256(name)
    digest: str = table.get("sha256", str, "").lower()
    if not _DIGEST.fullmatch(digest):
        raise table.fail(f"sha256: {len(digest)} characters; 64 hex digits are needed")
    if digest == _DIGEST_OF_NOTHING:
        raise table.fail("sha256: that of an empty key")
    return digest


def _key(table: _Table, tenant: Tenant) -> ApiKey:
    table.get("label", str, "")
    expires = table.get("expires", datetime, None)
    if expires is not None and expires.tzinfo is None:
        raise table.fail("expires: a time with its zone is needed, as 2030-01-31T00:00:00Z")
    return ApiKey(
        tenant,
        expires_at=expires.timestamp() if expires else None,
        disabled=table.get("disabled", bool, False),
    )
