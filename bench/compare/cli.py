"""`noria bench compare`: the classic comparisons."""

import click

from bench.compare.batching import batching
from bench.compare.chunks import chunked_prefill
from bench.compare.one_by_one import one_by_one
from bench.compare.prefix import prefix_cache
from bench.compare.routing import routing


@click.group()
def compare() -> None:
    """Why a server of this kind exists: one command and one plot for each reason."""


for _command in (one_by_one, batching, prefix_cache, chunked_prefill, routing):
    compare.add_command(_command)
