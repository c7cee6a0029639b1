"""Tables on the terminal."""

import click


def print_table(corner: str, heads: list[str], rows: list[list[str]]) -> None:
    """A row per list, its first entry on the left, figures on the right."""
    lines = [[corner, *heads], *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(1 + len(heads))]
    for line in lines:
        name, *figures = (text for text in line)
        cells = [f"{text:>{width}}" for text, width in zip(figures, widths[1:], strict=True)]
        click.echo("  ".join([f"{name:<{widths[0]}}", *cells]))
