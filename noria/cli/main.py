"""The `noria` command."""

import click

from noria.cli.chat import chat
from noria.cli.demo import demo
from noria.cli.fetch import fetch
from noria.cli.up import up


@click.group(
    context_settings={"auto_envvar_prefix": "NORIA", "help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="noria")
def main() -> None:
    """Serve an open-weight chat model, and talk to it."""


for _command in (up, chat, demo, fetch):
    main.add_command(_command)
