"""A client's TLS files are checked when it is made; a key in the clear is warned of."""

import warnings

import pytest
from click.testing import CliRunner

from noria import AsyncClient, Client, Tls, UnencryptedKeyWarning
from noria.cli.main import main
from tests.support.canary import API_KEY

ELSEWHERE = "router.internal:50051"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_key_to_another_computer_is_warned_of_unless_encrypted(kind, tmp_path):
    with pytest.warns(UnencryptedKeyWarning, match="travels unencrypted") as told:
        kind(ELSEWHERE, api_key=API_KEY)
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    ("address", "options"),
    [
        (ELSEWHERE, {"api_key": API_KEY, "tls": Tls()}),
        ("localhost:50051", {"api_key": API_KEY}),
        (ELSEWHERE, {}),
    ],
)
def test_no_warning_without_cause(address, options, monkeypatch):
    monkeypatch.delenv("NORIA_API_KEY", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Client(address, **options).close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("tls", "says"),
    [
        (Tls("none.pem"), "tls.ca: none.pem: No such file"),
        (Tls(__file__), f"tls.ca: {__file__}: no certificates in PEM"),
        (Tls(cert=__file__), "tls.key: none; tls.cert needs it"),
    ],
)
def test_files_that_cannot_be_used_are_named(kind, tls, says):
    with pytest.raises(ValueError, match=says):
        kind("localhost:1", api_key="k", tls=tls)


def command(*argv):
    return CliRunner().invoke(main, argv, env={"NORIA_API_KEY": API_KEY})


def test_the_command_warns_on_one_line():
    # An address of RFC 5737 that nobody has; the deadline is not waited for.
    told = command("chat", "--address", "router.invalid:1", "q")
    lines = told.stderr.splitlines()
    assert lines[0].startswith("warning: the API key travels unencrypted")
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--client-cert", "a.pem"], "--ca: none; the other options of TLS need it"),
        (["--ca", "none.pem"], "tls.ca: none.pem: No such file or directory"),
    ],
)
def test_the_command_names_what_is_wrong_with_its_files(argv, says):
    told = command(*argv, "chat", "q")
    assert told.exit_code != 0
    assert says in told.stderr
