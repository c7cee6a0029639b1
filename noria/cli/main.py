"""The `noria` command."""

import importlib

import click

from noria.cli.batch import batch
from noria.cli.chat import chat
from noria.cli.demo import demo
from noria.cli.fetch import fetch
from noria.cli.fleet import drain, ps, status
from noria.cli.keys_command import keys
from noria.cli.plan import plan
from noria.cli.tls import tls_of, tls_options, told_warnings
from noria.cli.up import up
from noria.cli.usage import usage

# Commands of packages that the base install does not need: module and attribute.
_ON_DEMAND = {"bench": ("bench.cli", "bench")}


class _Commands(click.Group):
    """Loads a command of another extra when it is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ON_DEMAND])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ON_DEMAND:
            return super().get_command(ctx, cmd_name)
        module, attribute = _ON_DEMAND[cmd_name]
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            return _missing(cmd_name, error.name or "")
        return command


def _missing(command: str, package: str) -> click.Command:
    """Stands for a command that cannot be loaded, in the list of commands too."""

    def refuse() -> None:
        raise click.ClickException(f'{package} is missing: pip install "noria[{command}]"')

    return click.Command(command, callback=refuse, help=f'Needs pip install "noria[{command}]".')


@click.group(
    cls=_Commands,
    context_settings={"auto_envvar_prefix": "NORIA", "help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="noria")
@tls_options
@click.pass_context
def main(
    context: click.Context,
    ca: str | None,
    client_cert: str | None,
    client_key: str | None,
    server_name: str | None,
) -> None:
    """Serve an open-weight chat model, and talk to it."""
    context.obj = tls_of(ca, client_cert, client_key, server_name)
    context.with_resource(told_warnings())


for _command in (up, chat, batch, plan, demo, fetch, keys, status, ps, drain, usage):
    main.add_command(_command)
