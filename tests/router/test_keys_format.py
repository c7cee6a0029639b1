"""Keys and tenants as TOML: what is taken, and how whatever else is refused."""

from datetime import UTC, datetime
from hashlib import sha256

import pytest

from router.auth import ApiKey, Tenant
from router.keys_format import MAX_BYTES, KeysFormatError, parse_keys
from router.tenant_limits import UNLIMITED, TenantLimits

METHODS = frozenset({"Chat", "StreamChat"})
A, B = sha256(b"a").hexdigest(), sha256(b"b").hexdigest()
MARK = "MARK7f3a"


def parse(text):
    return parse_keys(text.encode(), METHODS)


def problem(text):
    with pytest.raises(KeysFormatError) as caught:
        parse(text)
    assert MARK not in str(caught.value)
    return caught.value


def test_every_field_is_read():
    keys = parse(f"""
        [[tenants]]
        name = "search"
        models = ["small", "large"]
        methods = ["Chat"]
        priority_ceiling = -3
        cache_group = "shared"
        requests_per_minute = 600
        tokens_per_minute = 10_000
        concurrent_requests = 3
        concurrent_encodes = 2
        queue_share = 0.5

        [[tenants.keys]]
        sha256 = "{A.upper()}"
        label = "ci"
        expires = 2030-01-31T00:00:00Z

        [[tenants.keys]]
        sha256 = "{B}"
        disabled = true
    """)
    limits = TenantLimits(600, 10_000, 3, 2, 0.5)
    models, methods = frozenset({"small", "large"}), frozenset({"Chat"})
    tenant = Tenant("search", models, methods, -3, "shared", limits)
    expires = datetime(2030, 1, 31, tzinfo=UTC).timestamp()
    assert keys == {A: ApiKey(tenant, expires_at=expires), B: ApiKey(tenant, disabled=True)}


def test_what_is_left_out_limits_nothing_and_shares_no_cache():
    keys = parse(f'[[tenants]]\nname = "t"\n[[tenants.keys]]\nsha256 = "{A}"')
    assert keys[A] == ApiKey(Tenant("t"))
    assert keys[A].tenant.models is None
    assert keys[A].tenant.limits == UNLIMITED


def test_tables_may_be_written_inline():
    assert list(parse(f'tenants = [{{name = "t", keys = [{{sha256 = "{A}"}}]}}]')) == [A]


def tenant(extra="", keys=f'[[tenants.keys]]\nsha256 = "{A}"'):
    return f'[[tenants]]\nname = "t"\n{extra}\n{keys}'


@pytest.mark.parametrize(
    ("text", "reason", "line"),
    [
        (f"[[tenants]]\nname = {MARK}", "not TOML", 2),
        (f'x = 1\nx = "{MARK}"\n', "not TOML", 2),
        (f"{MARK} = 1\n", "an unknown field; there are tenants", None),
        ("", "there is no key in it", None),
        ('[[tenants]]\nname = "t"', "there is no key in it", None),
        ("tenants = 3", "tenants: int; list is needed", None),
        ("tenants = [3]", "tenants: a list of tables is needed", None),
        (tenant(f'model = ["{MARK}"]'), "an unknown field; there are name, models", 1),
        (tenant(f'models = "{MARK}"'), "models: str; list is needed", 1),
        (tenant("models = [3]"), "models: a list of strings is needed", 1),
        (tenant(f'methods = ["{MARK}"]'), "methods: an unknown one; there are Chat, Stream", 1),
        (tenant("priority_ceiling = 101"), "priority_ceiling: from -100 to 100", 1),
        (tenant("priority_ceiling = true"), "priority_ceiling: bool; int is needed", 1),
        (tenant("requests_per_minute = 0"), "requests_per_minute: 0; from 1 to 10000000000", 1),
        (tenant("tokens_per_minute = 1.5"), "tokens_per_minute: float; int is needed", 1),
        (tenant("concurrent_requests = true"), "concurrent_requests: bool; int is needed", 1),
        (tenant("concurrent_encodes = 1000001"), "concurrent_encodes: 1000001; from 1 to 10", 1),
        (tenant("queue_share = 0.0"), "queue_share: 0; above 0, at most 1", 1),
        (tenant("queue_share = nan"), "queue_share: nan; above 0, at most 1", 1),
        (tenant("queue_share = 2"), "queue_share: 2; above 0, at most 1", 1),
        (tenant(f'queue_share = "{MARK}"'), "queue_share: str; float is needed", 1),
        (tenant(keys="keys = [3]"), "keys: a list of tables is needed", None),
        ("[[tenants]]\nname = ''", "name: 1 to 64 letters", 1),
        (f"[[tenants]]\nname = '{MARK} x'", "name: 1 to 64 letters", 1),
        (f"{tenant()}\n[[tenants]]\nname = 't'", "name: another tenant has the same", 6),
        (tenant(keys=f'[[tenants.keys]]\nsha256 = "{MARK}"'), "sha256: 8 characters; 64", 4),
        (tenant(keys=f'\n[[ tenants . keys ]]\nsha256 = "{"g" * 64}"'), "sha256: 64 char", 5),
        (
            tenant(keys=f'[[tenants.keys]]\nsha256 = "{"0" * 64}"\ncertificate = "{MARK}"'),
            "certificate: in place of sha256, 1 to 256 bytes are needed",
            4,
        ),
        (tenant(keys='[[tenants.keys]]\ncertificate = ""'), "certificate: in place of", 4),
        (tenant(keys="[[tenants.keys]]\ncertificate = 3"), "certificate: int; str is needed", 4),
        (tenant(keys="[[tenants.keys]]"), "sha256: 0 characters; 64 hex digits", 4),
        (tenant(keys=f'[[tenants.keys]]\nsha256 = "{sha256().hexdigest()}"'), "an empty key", 4),
        (f'{tenant()}\n[[tenants.keys]]\nsha256 = "{A}"', "another key has the same", 6),
        (tenant() + f"\nkey = '{MARK}'", "an unknown field; there are sha256, cert", 4),
        (tenant() + "\nlabel = 3", "label: int; str is needed", 4),
        (tenant() + "\nexpires = 2030-01-01", "expires: date; datetime is needed", 4),
        (tenant() + "\nexpires = 2030-01-01T00:00:00", "expires: a time with its zone", 4),
        (tenant() + "\ndisabled = 1", "disabled: int; bool is needed", 4),
        ("a = " + "[" * 5000, "nested too deeply", None),
    ],
)
def test_a_problem_is_told_with_its_line_and_without_what_stands_there(text, reason, line):
    told = problem(text)
    assert reason in told.reason
    assert told.line == line


def test_bytes_that_are_no_text_are_told_by_their_line():
    with pytest.raises(KeysFormatError, match="line 3: not UTF-8"):
        parse_keys(b"# a\n# b\n\xff", METHODS)


def test_a_huge_file_is_refused_unread():
    with pytest.raises(KeysFormatError, match=f"more than {MAX_BYTES} bytes"):
        parse_keys(b"#" * (MAX_BYTES + 1), METHODS)


def test_a_number_of_too_many_digits_is_refused_like_any_broken_file():
    with pytest.raises(KeysFormatError, match="cannot be read"):
        parse_keys(b"x = " + b"9" * 5000, METHODS)


def test_a_tenant_named_like_a_group_shares_nothing_with_it():
    digests = [sha256(name.encode()).hexdigest() for name in ("a", "b")]
    key_a, key_b = (f'[[tenants.keys]]\nsha256 = "{digest}"\n' for digest in digests)
    text = f'[[tenants]]\nname = "shared"\n{key_a}[[tenants]]\nname = "x"\n'
    text += f'cache_group = "shared"\n{key_b}'
    keys = parse_keys(text.encode(), METHODS)
    salts = {keys[digest].tenant.cache_salt(b"secret") for digest in digests}
    assert len(salts) == 2
