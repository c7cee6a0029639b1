"""`python -m noria.cli` is the `noria` command."""

from noria.cli.main import main

main(prog_name="noria")
