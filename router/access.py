"""Who may ask: keys from a file, a flag or the store, and what a change of them ends."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from noria.reasons import Reason, RequestError
from noria.service.guard import GuardedRequests
from noria.service.limits import MAX_CHAT_BYTES
from noria.v1 import chat_pb2
from router.auth import ApiKey, Keys, Metadata, Tenant, carries_key
from router.config import RouterConfig
from router.key_admin import KeyAdmin
from router.key_cache import KeyCache
from router.keys_file import KeysFile
from router.keys_format import KeysFormatError
from router.live import LiveRequests
from router.store.base import StoreUnavailableError
from router.store.keys import KEYS_CHANNEL
from router.store.opened import Store

Loop = Callable[[], Coroutine[Any, Any, None]]

# All services but those that gRPC itself defines: health and reflection.
_ASKS_FOR_KEYS = "/noria.v1."


class Access:
    """What this router knows of keys, and how it stays true.

    `keys_file` is the one that the store's keys were read from, if any; `on_change` hears when
    keys have become known, or too old.
    """

    def __init__(
        self,
        config: RouterConfig,
        store: Store,
        live: LiveRequests,
        keys_file: KeysFile | None,
        *,
        on_change: Callable[[], None],
        clock: Callable[[], float],
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self.keys = KeyCache(
            store.keys,
            max_age_s=config.keys_max_age_s,
            patience_s=config.redis_timeout_s,
            on_revoked=self._end_revoked,
            on_change=on_change,
            clock=clock,
            log=log,
        )
        self.admin = KeyAdmin(store.keys, self.keys, time.time, log)
        self._config = config
        self._file_keys = store.file_keys
        self._keys_file = keys_file
        self._live = live
        self._log = log
        self._knows_certificates = config.tls is not None and config.tls.ca is not None
        if store.shared is not None:
            store.shared.news.listen(KEYS_CHANNEL, lambda _: self.keys.wake())

    def guard(self) -> GuardedRequests:
        """Parses what clients send once their key is known, and no more than a chat may hold."""
        return GuardedRequests(MAX_CHAT_BYTES, self._refusal)

    async def begin(self) -> None:
        """Read the keys for the first time; a store that is away is read later."""
        with contextlib.suppress(StoreUnavailableError):
            await self.keys.refresh()

    def loops(self) -> Sequence[Loop]:
        """Each may be cancelled at any of its awaits and started again."""
        following = [self.follow_file] if self._keys_file else []
        return [self.keys.follow, *following]

    async def follow_file(self) -> None:
        """Take over what the keys file says now; one that is broken changes nothing."""
        while self._keys_file is not None:
            await asyncio.sleep(self._config.keys_poll_s)
            try:
                keys = await asyncio.to_thread(self._keys_file.poll)
            except asyncio.CancelledError:
                # What the thread has read is lost: the next look begins anew.
                self._keys_file = keys_file_of(self._config)
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
                await self.keys.refresh()
                self._log.info("keys_file_read", keys=len(keys))

    async def _refusal(self, method: str, metadata: Metadata) -> RequestError | None:
        if not method.startswith(_ASKS_FOR_KEYS):
            return None
        if self._knows_certificates and not carries_key(metadata):
            # Of a certificate nothing is told here; whoever has one is no stranger.
            return None
        try:
            await self.keys.authenticate(metadata)
        except RequestError as error:
            return error
        return None

    def _end_revoked(self, key_ids: frozenset[str]) -> None:
        error = RequestError(Reason.KEY_REVOKED, "the API key was revoked")
        ended = self._live.interrupt_keys(key_ids, error)
        self._log.info("keys_revoked", key_ids=sorted(key_ids), requests_ended=ended)


def keys_file_of(config: RouterConfig) -> KeysFile | None:
    """The file as if never read; None if keys stand in none."""
    methods = chat_pb2.DESCRIPTOR.services_by_name["ChatService"].methods_by_name
    return KeysFile(config.keys_file, frozenset(methods)) if config.keys_file else None


def first_keys(config: RouterConfig, file: KeysFile | None) -> Keys | None:
    """None if keys are in Redis. Raises KeysFormatError: without any there is nobody to serve."""
    if file is not None:
        return file.poll() or {}
    if config.api_key_sha256:
        return {config.api_key_sha256.lower(): ApiKey(Tenant("default"))}
    return None
