"""Loops that should never end."""

import asyncio

import pytest

from noria.service.tasks import keep_running


class EnoughError(Exception):
    """The test has seen what it wants."""


async def pauses_of(ends, monkeypatch):
    """How long `keep_running` pauses after each of these ends, in seconds."""
    pauses, left = [], iter(ends)

    async def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == len(ends):
            raise EnoughError

    async def run():
        raise next(left)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(EnoughError):
        await keep_running(run, lambda error: None, pause_s=1, max_pause_s=5)
    return pauses


async def test_one_error_on_another_is_tried_again_ever_later(monkeypatch):
    """A fault that lasts fills no log."""
    assert await pauses_of([OSError()] * 5, monkeypatch) == [1, 2, 4, 5, 5]


async def test_an_end_without_an_error_is_soon_over(monkeypatch):
    """To be cancelled says nothing about the next time."""
    ends = [OSError(), OSError(), asyncio.CancelledError(), OSError()]
    assert await pauses_of(ends, monkeypatch) == [1, 2, 1, 2]
