"""Wakes whoever waits for what another process did, by pub/sub.

A hint and no more: a message may be lost with its connection, so whoever listens also looks
from time to time. After each connect everybody is woken once, with an empty message.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from router.store.redis_connection import RedisConnection

Listener = Callable[[str], None]

_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 1.0
_PING_S = 1.0
# A connection that has said nothing for so long is dead, whatever TCP thinks of it.
_SILENCE_S = 3.0


class News:
    """Subscriptions over one connection. Listeners are called on the event loop."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._listeners: dict[str, Listener] = {}

    def listen(self, channel: str, listener: Listener) -> None:
        """Call `listener` with each message of the channel; before `run` begins."""
        self._listeners[channel] = listener

    async def publish(self, channel: str, message: str) -> None:
        """Raises StoreUnavailableError."""
        await self._connection.call(lambda client: client.publish(channel, message))

    async def run(self) -> None:
        """Stay subscribed until cancelled."""
        delay = _FIRST_DELAY_S
        loop = asyncio.get_running_loop()
        while self._listeners:
            started = loop.time()
            try:
                await self._connection.wait_available()
                await self._subscribed()
            except (RedisError, OSError, TimeoutError) as error:
                self._connection.log.warning("store_news_lost", kind=type(error).__name__)
            if loop.time() - started > _SILENCE_S:
                delay = _FIRST_DELAY_S
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, _MAX_DELAY_S)

    async def _subscribed(self) -> None:
        # Its own connection: nothing else may be read from it.
        async with self._connection.client.pubsub() as subscription:
            await subscription.subscribe(*self._listeners)
            await self._receive(subscription)

    async def _receive(self, subscription: Any) -> None:
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while loop.time() - heard < _SILENCE_S:
            message = await subscription.get_message(timeout=_PING_S)
            if message is None:
                await subscription.ping()
                continue
            heard = loop.time()
            listener = self._listeners.get(message.get("channel") or "")
            if listener is not None and message["type"] in ("subscribe", "message"):
                listener(message["data"] if message["type"] == "message" else "")
        raise TimeoutError
