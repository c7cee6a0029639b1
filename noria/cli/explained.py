"""Asking a question and telling afterwards what became of it: `noria chat --explain`."""

import time
from collections.abc import Callable, Sequence

from rich.console import Console

from noria.cli.terminal import write_piece
from noria.client.errors import NoriaError
from noria.client.request import ChatOptions
from noria.client.sync_client import Client
from noria.explain.observation import Arrival, Asked, Failure, Observation
from noria.explain.render import show
from noria.explain.story import story_of
from noria.v1 import common_pb2

_ASK_AGAIN_S = 2.0


def explained_answer(
    client: Client,
    turns: Sequence[tuple[str, str]],
    options: ChatOptions,
    *,
    all_steps: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Write the answer as it comes, then the story of the request; the answer.

    Raises NoriaError after the story of a request that was not served.
    """
    text, seen, error = _watched(client, turns, options, clock)
    show(story_of(seen), Console(), all_steps=all_steps)
    if error is not None:
        raise error
    return text


def _watched(
    client: Client,
    turns: Sequence[tuple[str, str]],
    options: ChatOptions,
    clock: Callable[[], float],
) -> tuple[str, Observation, NoriaError | None]:
    begun = clock()
    arrivals: list[Arrival] = []
    error: NoriaError | None = None
    try:
        asked: ChatOptions = {**options, "trace_steps": True}
        with client.stream_chat(turns, **asked) as stream:
            for event in stream.events():
                arrivals.append(Arrival(_us(clock() - begun), event))
                write_piece(event.content_block_delta.text)
    except NoriaError as caught:
        error = caught
    wall_us = _us(clock() - begun)
    if error is not None and error.timeline is None:
        error.timeline = _recorded(client, error.request_id)
    text = "".join(arrival.event.content_block_delta.text for arrival in arrivals)
    if text:
        print()
    return text, _observation(turns, options, arrivals, wall_us, error), error


def _recorded(client: Client, request_id: str) -> common_pb2.Timeline | None:
    """What the router keeps of a request whose call ended on this side, as by its deadline."""
    try:
        return client.timeline(request_id, timeout=_ASK_AGAIN_S) if request_id else None
    except NoriaError:
        return None


def _observation(
    turns: Sequence[tuple[str, str]],
    options: ChatOptions,
    arrivals: Sequence[Arrival],
    wall_us: int,
    error: NoriaError | None,
) -> Observation:
    asked = Asked(
        turns, options.get("system"), options.get("max_tokens"), options.get("temperature")
    )
    if error is not None:
        timeline = error.timeline or common_pb2.Timeline()
        return Observation(asked, wall_us, arrivals, timeline, _failure(error))
    ends = (a.event.message_delta.timeline for a in arrivals if a.event.HasField("message_delta"))
    return Observation(asked, wall_us, arrivals, next(ends, common_pb2.Timeline()))


def _failure(error: NoriaError) -> Failure:
    reason = error.reason.value if error.reason else error.code.name
    # Its class says in one line what to do.
    advice = (type(error).__doc__ or "").partition("\n")[0]
    return Failure(reason, error.message, advice, error.request_id)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
