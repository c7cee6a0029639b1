"""What a router does over and over beside answering calls; its sessions are not here."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from noria.service.server import RunningServer
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.live import LiveRequests
from router.stalls import StallWatch

Loop = Callable[[], Coroutine[Any, Any, None]]


class Loops:
    """`ready` is what the router's health says, `changed` that it may have become another.

    Each loop may be cancelled at any of its awaits and started again.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        live: LiveRequests,
        dispatcher: Dispatcher,
        stalls: StallWatch,
        ready: asyncio.Event,
        changed: asyncio.Event,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._config = config
        self._live = live
        self._dispatcher = dispatcher
        self._stalls = stalls
        self._ready = ready
        self._changed = changed
        self._log = log

    def all(self, server: RunningServer) -> list[Loop]:
        """All of them."""
        return [lambda: self.report_health(server), self.tick]

    async def report_health(self, server: RunningServer) -> None:
        while True:
            self._changed.clear()
            await server.set_ready(self._ready.is_set())
            await self._changed.wait()

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.tick_s)
            self._live.end_slow_readers()
            self._dispatcher.give_up_unserved(self._config.worker_patience_s)
            self._watch_stalls()

    def _watch_stalls(self) -> None:
        for news in self._stalls.check():
            event = "worker_stalled" if news.is_stalled else "worker_recovered"
            age_s = round(news.step_age_s, 3)
            self._log.warning(event, worker_id=news.worker_id, step_age_s=age_s, moved=news.moved)
