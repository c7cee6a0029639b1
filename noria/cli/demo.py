"""`noria demo`: start everything, ask one question, stop everything."""

import sys
import time
from typing import Any

import click

from noria.cli.options import stack_options
from noria.cli.stack import RunningStack
from noria.cli.terminal import one_line, tell, write_piece
from noria.cli.up import prepare, run_stack
from noria.client.async_client import AsyncClient
from noria.client.errors import NoriaError
from noria.service.api_key import new_key

QUESTION = "Is a tomato a fruit?"
# As shells tell of a program that SIGINT ended.
_INTERRUPTED = 130


@click.command()
@click.option("--question", default=QUESTION, show_default=True)
@stack_options
def demo(question: str, model: str, workers: int, verbose: bool, **flags: Any) -> None:
    """Start the services, stream the answer to one question, stop them.

    The answer at temperature 0 comes as it is made, and once more on one line.
    """
    # For this run alone: a demonstration leaves the user's own key as it is.
    key = new_key()
    plan = prepare(0, [model], workers, flags, key)

    answered = False

    async def ask(stack: RunningStack) -> None:
        nonlocal answered
        tell(f"> {question}")
        await _answer(stack.address, key, question)
        answered = True

    try:
        run_stack(plan, ask, verbose=verbose)
    except NoriaError as error:
        raise click.ClickException(str(error)) from error
    if not answered:
        # Only a signal ends it before.
        sys.exit(_INTERRUPTED)


async def _answer(address: str, key: str, question: str) -> None:
    async with AsyncClient(address, api_key=key) as client:
        asked, times = time.monotonic(), []
        async with client.stream_chat(question, temperature=0.0) as stream:
            async for piece in stream:
                times.append(time.monotonic() - asked)
                write_piece(piece)
    click.echo()
    if times:
        tell(
            f"{stream.result.usage.output_tokens} tokens in {len(times)} deltas:"
            f" the first after {times[0]:.2f} s, the last after {times[-1]:.2f} s"
        )
    click.echo(f"answer: {one_line(stream.result.text)}")
