"""What a router does over and over beside answering calls; its sessions are not here."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from noria.service.server import RunningServer
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.key_cache import KeyCache
from router.keys_file import KeysFile
from router.keys_format import KeysFormatError
from router.live import LiveRequests
from router.stalls import StallWatch
from router.store.memory_keys import MemoryKeys

Loop = Callable[[], Coroutine[Any, Any, None]]


class Loops:
    """`new_keys_file` gives a file as if never read, or None; `file_keys` holds what it says.

    `ready` is what the router's health says, `changed` that it may have become another.
    Each loop may be cancelled at any of its awaits and started again.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        keys_file: KeysFile | None,
        new_keys_file: Callable[[], KeysFile | None],
        keys: KeyCache,
        file_keys: MemoryKeys,
        live: LiveRequests,
        dispatcher: Dispatcher,
        stalls: StallWatch,
        ready: asyncio.Event,
        changed: asyncio.Event,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._config = config
        self._keys_file = keys_file
        self._new_keys_file = new_keys_file
        self._keys = keys
        self._file_keys = file_keys
        self._live = live
        self._dispatcher = dispatcher
        self._stalls = stalls
        self._ready = ready
        self._changed = changed
        self._log = log

    def all(self, server: RunningServer) -> list[Loop]:
        """Those that this router needs."""
        following = [self.follow_keys] if self._keys_file else []
        return [lambda: self.report_health(server), self.tick, self._keys.follow, *following]

    async def report_health(self, server: RunningServer) -> None:
        while True:
            self._changed.clear()
            await server.set_ready(self._ready.is_set())
            await self._changed.wait()

    async def follow_keys(self) -> None:
        """Take over what the keys file says now; one that is broken changes nothing."""
        while self._keys_file is not None:
            await asyncio.sleep(self._config.keys_poll_s)
            try:
                keys = await asyncio.to_thread(self._keys_file.poll)
            except asyncio.CancelledError:
                # What the thread has read is lost: the next look begins anew.
                self._keys_file = self._new_keys_file()
                raise
            except KeysFormatError as error:
                self._log.error("keys_file_refused", reason=error.reason, line=error.line)
                continue
            except Exception as error:
                # A revoked key must not stay valid because of whatever this was.
                self._log.error("keys_file_unread", kind=type(error).__name__)
                continue
            if keys is not None:
                self._file_keys.load(keys)
                await self._keys.refresh()
                self._log.info("keys_file_read", keys=len(keys))

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
