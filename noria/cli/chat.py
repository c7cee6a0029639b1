"""`noria chat`: one question, or a conversation."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from noria.cli.explained import explained_answer
from noria.cli.terminal import one_line, write_piece
from noria.cli.tls import why_unreachable
from noria.client.errors import NoriaError, UnreachableError
from noria.client.request import ChatOptions
from noria.client.sync_client import Client
from noria.client.tls import Tls

Turns = list[tuple[str, str]]
# Asks, writes the answer as it comes, and gives all of it.
Ask = Callable[[Client, Turns, ChatOptions], str]


def _read(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """The text of a file. Raises BadParameter."""
    try:
        return None if path is None else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise click.BadParameter(str(error)) from None


def _some(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...] | None:
    return values or None


@click.command()
@click.argument("question", required=False)
@click.option("--address", default="localhost:50051", show_default=True, help="The server's.")
@click.option("--model", help="Left out: the only one served.")
@click.option("--system", help="Text that stands before the conversation.")
@click.option("--max-tokens", type=int, help="Length of an answer at most.")
@click.option("--temperature", type=float, help="0 takes the likeliest token each time.")
@click.option("--seed", type=int, help="Makes the draws repeatable.")
@click.option(
    "--json-schema",
    type=click.Path(exists=True, dir_okay=False),
    callback=_read,
    help="File with a JSON schema that the answer follows.",
)
@click.option("--json-object", is_flag=True, default=None, help="The answer is a JSON object.")
@click.option("--regex", help="The whole answer matches this regular expression.")
@click.option(
    "--choice", multiple=True, callback=_some, help="The answer is this, or another --choice."
)
@click.option("--answer-line", is_flag=True, help="Afterwards print `answer: ...` on one line.")
@click.option("--explain", is_flag=True, help="Afterwards tell the request's life as tables.")
@click.option("--all-steps", is_flag=True, help="The same, with none of the steps left out.")
@click.pass_obj
def chat(
    tls: Tls | None,
    /,
    question: str | None,
    address: str,
    answer_line: bool,
    explain: bool,
    all_steps: bool,
    **given: Any,
) -> None:
    """Ask a question and see the answer as it is made.

    Without QUESTION a conversation: an empty line or Ctrl-D ends it, Ctrl-C
    during an answer stops that answer. If the input is no terminal, all of it
    is one question.
    """
    options = ChatOptions(**{k: v for k, v in given.items() if v is not None})  # type: ignore[typeddict-item]
    explains = explain or all_steps
    ask = partial(explained_answer, all_steps=all_steps) if explains else stream_answer
    try:
        # A refusal is told as it is, not tried again.
        with Client(address, retry=not explains, tls=tls) as client:
            if question is None and sys.stdin.isatty():
                converse(client, options, ask)
            else:
                _ask_once(client, question, options, ask, answer_line=answer_line)
    except UnreachableError as error:
        hint = why_unreachable(address, error.message, tls)
        if hint.startswith("no server"):
            hint += "; `noria up` starts one here"
        raise click.ClickException(f"{hint} ({error.message})") from error
    except (NoriaError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error


def _ask_once(
    client: Client, question: str | None, options: ChatOptions, ask: Ask, *, answer_line: bool
) -> None:
    text = sys.stdin.read().strip() if question is None else question
    if not text:
        raise ValueError("no question: give one as an argument or on the standard input")
    answer = ask(client, [("user", text)], options)
    if answer_line:
        click.echo(f"answer: {one_line(answer)}")


def stream_answer(client: Client, turns: Turns, options: ChatOptions) -> str:
    """Write the answer as it comes; all of it."""
    written = False
    try:
        with client.stream_chat(turns, **options) as stream:
            for piece in stream:
                write_piece(piece)
                written = True
            return stream.result.text
    finally:
        if written:
            click.echo()


def converse(client: Client, options: ChatOptions, ask: Ask = stream_answer) -> None:
    """Ask and answer until an empty line or the end of the input.

    A turn whose answer failed or was stopped is not part of what follows.
    """
    turns: Turns = []
    while question := _next_question():
        asked = [*turns, ("user", question)]
        try:
            answer = ask(client, asked, options)
        except KeyboardInterrupt:
            click.echo("(stopped; this turn is forgotten)", err=True)
        except NoriaError as error:
            click.echo(f"Error: {error}", err=True)
        else:
            turns = [*asked, ("assistant", answer)]


def _next_question() -> str:
    try:
        line: str = click.prompt("", default="", show_default=False, prompt_suffix="> ")
    except click.Abort:
        return ""
    return line.strip()
