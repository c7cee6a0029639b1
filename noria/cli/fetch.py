"""`noria fetch`: have a model's files before they are needed."""

import click

from noria.cli.model_source import DEFAULT_MODEL
from noria.cli.up import located_model


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
def fetch(model: str) -> None:
    """Download MODEL if it is not there yet, and print where it lies."""
    click.echo(located_model(model).path)
