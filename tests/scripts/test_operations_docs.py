"""docs/operations.md tells of every flag, its variable and its default as they are."""

import re
from dataclasses import fields

import click
import pytest
from click.testing import CliRunner

from router.config import RouterConfig
from router.keys_format import _KEY_FIELDS, _TENANT_FIELDS, parse_keys
from scripts import operations_docs
from tokenizer_svc.config import TokenizerConfig
from worker.config import WorkerConfig


def test_the_page_is_not_stale():
    assert operations_docs.page() == operations_docs.PAGE.read_text()


def test_every_flag_says_what_it_means():
    for _, command in operations_docs.COMMANDS.values():
        for option in command.params:
            assert getattr(option, "help", "given"), f"{command.name} {option.name}"


@pytest.mark.parametrize(
    ("name", "config"),
    [("router", RouterConfig), ("tokenizer", TokenizerConfig), ("worker", WorkerConfig)],
)
def test_flags_are_the_configurations_fields(name, config):
    """What a flag gives has a place, under the same name and with the same default."""
    _, command = operations_docs.COMMANDS[name]
    defaults = {field.name: field.default for field in fields(config)}
    for option in command.params:
        if option.name in ("parent_pid", "log_level"):
            continue
        if option.name.startswith("tls_"):
            # Several make one: files that belong together.
            assert defaults["tls"] is None
            continue
        assert option.name in defaults
        told = option.to_info_dict()["default"]
        if not option.required and told not in (None, ()):
            assert told == defaults[option.name]


def test_the_variables_are_those_that_click_reads():
    seen = {}

    @click.command(context_settings={"auto_envvar_prefix": "NORIA_X"})
    @click.option("--some-flag")
    @click.option("--worker", "workers", multiple=True, envvar="NORIA_X_WORKER")
    def command(**values):
        seen.update(values)

    names = [operations_docs.variable("NORIA_X", option) for option in command.params]
    assert names == ["NORIA_X_SOME_FLAG", "NORIA_X_WORKER"]
    CliRunner().invoke(command, env=dict(zip(names, ["a", "b c"], strict=True)))
    assert seen == {"some_flag": "a", "workers": ("b", "c")}


def test_the_keys_file_of_the_page_is_read_and_has_every_field():
    (example,) = re.findall(r"```toml\n(.*?)```", operations_docs.PAGE.read_text(), re.DOTALL)
    key, *_ = parse_keys(example.encode(), frozenset({"StreamChat", "Chat"})).values()
    assert key.tenant.models == {"chat"}
    for name in (*_TENANT_FIELDS, *_KEY_FIELDS):
        assert re.search(rf"^{name} =|tenants\.{name}\]", example, re.MULTILINE), name
