"""What commands for operators share: whom they call, and how a failure is told."""

import contextlib
from collections.abc import Iterator, Sequence

import click

from noria.cli.tls import why_unreachable
from noria.client.admin import AdminClient
from noria.client.errors import NoriaError, UnreachableError
from noria.client.tls import Tls

ADDRESS = click.option(
    "--address", default="localhost:50051", show_default=True, help="A router's."
)


@contextlib.contextmanager
def administering(address: str, tls: Tls | None) -> Iterator[AdminClient]:
    """A client for the block; what goes wrong in it ends the command with one line."""
    try:
        with AdminClient(address, tls=tls) as client:
            yield client
    except UnreachableError as error:
        why = why_unreachable(address, error.message, tls)
        raise click.ClickException(f"{why} ({error.message})") from error
    except (NoriaError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text, for people and for awk: no cell is empty."""
    cells = [[cell or "-" for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
    return "\n".join(lines)
