"""The router, assembled: what runs, in which order it starts, and how it stops."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable

import grpc
import structlog

from noria.reasons import Reason, RequestError
from noria.service.channel import connection_age
from noria.service.guard import GuardedRequests
from noria.service.limits import MAX_CHAT_BYTES
from noria.service.log import loop_end
from noria.service.metrics import new_registry, serving_metrics
from noria.service.server import RunningServer, running_server
from noria.service.tasks import keep_running
from noria.service.tls_files import opened
from noria.service.tls_watch import TlsWatch
from noria.v1 import admin_pb2_grpc, chat_pb2, chat_pb2_grpc
from router import admin_servicer
from router.admin_servicer import AdminServicer
from router.auth import ApiKey, Keys, Metadata, Tenant, carries_key
from router.bookkeeping import Bookkeeping
from router.calls import Admission, Calls
from router.chat import Chats
from router.config import RouterConfig
from router.connection import background
from router.discovery import worker_sources
from router.dispatch import Dispatcher
from router.exchange import exchange
from router.fleet import Fleet
from router.key_admin import KeyAdmin
from router.key_cache import KeyCache
from router.keys_file import KeysFile
from router.ledger.prices import Prices, read_prices
from router.limit_book import Books
from router.limit_sharing import LimitSharing, SharingFigures
from router.limiter import Limiter
from router.live import LiveRequests
from router.loops import Loops
from router.metrics import RouterMetrics, RouterState
from router.peers import new_request_id
from router.queue import RequestQueue
from router.record import RequestRecord
from router.registry import Registry
from router.servicer import ChatServicer
from router.stalls import StallWatch
from router.state import router_state
from router.store.base import StoreUnavailableError
from router.store.keys import KEYS_CHANNEL
from router.store.ledger_store import Retention
from router.store.opened import Store, open_store
from router.token_stream import TokenStream
from router.tokenizers import Tokenizers
from router.tracing import new_tracing
from router.usage import UsageReports
from router.worker_session import WorkerSession
from router.worker_sessions import Run, WorkerSessions
from router.worker_state import SilenceLimits

SERVICE_NAMES = ("noria.v1.ChatService", admin_servicer.SERVICE_NAME)
# All services but those that gRPC itself defines: health and reflection.
_ASKS_FOR_KEYS = "/noria.v1."


# How long workers have to tell of the last requests, and how often it is looked whether they did.
_TELL_S, _POLL_S = 1.0, 0.02


def random_seed() -> int:
    """A seed for a request that names none: 63 random bits."""
    return secrets.randbits(63)


class Router:
    """All parts of one router and how they hang together; `running_router` makes one.

    `address` and `metrics_address` are host:port with the ports really taken.
    """

    def __init__(
        self,
        config: RouterConfig,
        store: Store,
        keys_file: KeysFile | None,
        prices: Prices,
        *,
        clock: Callable[[], float],
        seed_source: Callable[[], int],
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self.address = self.metrics_address = ""
        self.registry = Registry(any_name=len(config.tokenizers) == 1)
        self.metrics_registry = new_registry()
        self._metrics = RouterMetrics(self.metrics_registry, self.state)
        self._config = config
        self.tls = opened(config.tls)
        self._peer_tls = opened(config.peer_tls)
        self._knows_certificates = config.tls is not None and config.tls.ca is not None
        self._store = store
        self._clock = clock
        self._log = log
        self._instance_id = secrets.token_hex(4)
        self._tracing = new_tracing(config, self._instance_id, self._metrics.on_spans, log)
        self._live = LiveRequests(clock)
        self._books = Bookkeeping(
            self._instance_id, store, prices,
            lease_s=config.lease_s, max_rows=config.ledger_max_rows, clock=clock, log=log,
        )  # fmt: skip
        self._exchange = exchange(self._instance_id, store.shared, store.leases, self._live)
        self._admission = Admission()
        self._queue = RequestQueue[TokenStream](
            config.max_queued_requests, config.max_queued_tokens, clock
        )
        self._dispatcher = Dispatcher(self._queue, self.registry, clock)
        books = Books(clock, config.lease_s if store.limits else 0)
        self._sharing = self._new_sharing(books)
        self._limiter = Limiter(books, self._sharing, self._metrics.on_tokens_left)
        self._keys = self._new_key_cache()
        self._ready = asyncio.Event()
        self._changed = asyncio.Event()
        self._tokenizers = self._new_tokenizers()
        self._sessions = self._new_sessions()
        self._calls = self._new_calls()
        self._servicer = self._new_servicer(seed_source)
        key_admin = KeyAdmin(store.keys, self._keys, time.time, log)
        self._admin = AdminServicer(key_admin, self._new_fleet(), self._calls)
        self._loops = self._new_loops(keys_file)
        self._listen()

    def held(self) -> dict[str, int]:
        """Everything held for requests right now, by kind; all zero at rest."""
        return {
            "requests": len(self._live),
            "permits": self._queue.num_requests,
            "limit_holds": self._limiter.num_holds,
            "queued_tokens": self._queue.num_tokens,
            "decode_slots": self._tokenizers.num_slots,
            "attempts": sum(len(worker.attempts) for worker in self.registry),
            "tokens_in_flight": sum(worker.tokens_in_flight for worker in self.registry),
        }

    def state(self) -> RouterState:
        """What is waiting, running and connected right now."""
        return router_state(
            self._config,
            self._store,
            self._books,
            self.held(),
            self._queue,
            self.registry,
            self._sharing.figures if self._sharing else SharingFigures(),
            self._sessions.num_known,
        )

    async def wait_ready(self) -> None:
        """Return once a usable worker and its model's tokenizer are connected."""
        await self._ready.wait()

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, report not ready, and let what runs finish within `grace_s`.

        What still runs then ends with DRAINING.
        """
        self._admission.is_open = False
        self._on_change()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._live.wait_idle()
        self._live.interrupt_all(RequestError(Reason.DRAINING, "the router stopped"))
        await self._live.wait_idle()
        await self._wait_told()

    async def _wait_told(self) -> None:
        """Let workers say what they computed for requests that have ended; they soon do."""
        for _ in range(round(_TELL_S / _POLL_S)):
            if not any(worker.attempts for worker in self.registry):
                return
            await asyncio.sleep(_POLL_S)

    def guard(self) -> GuardedRequests:
        """Parses what clients send once their key is known, and no more than a chat may hold."""

        async def refusal(method: str, metadata: Metadata) -> RequestError | None:
            if not method.startswith(_ASKS_FOR_KEYS):
                return None
            if self._knows_certificates and not carries_key(metadata):
                # Of a certificate nothing is told here; whoever has one is no stranger.
                return None
            try:
                await self._keys.authenticate(metadata)
            except RequestError as error:
                return error
            return None

        return GuardedRequests(MAX_CHAT_BYTES, refusal)

    def add_services(self, server: grpc.aio.Server) -> None:
        """Register what clients and operators call."""
        chat_pb2_grpc.add_ChatServiceServicer_to_server(self._servicer, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, server)

    @contextlib.asynccontextmanager
    async def running(self, server: RunningServer) -> AsyncIterator[None]:
        """Do inside the block what is done beside answering calls."""
        with contextlib.suppress(StoreUnavailableError):
            await self._keys.refresh()
        tokenizers = [each.run for each in self._tokenizers]
        loops = [*tokenizers, *self._exchange.loops, *self._loops.all(server)]
        loops.append(self._limiter.forget_idle)
        kept = [keep_running(loop, loop_end(self._log)) for loop in loops]
        watch = TlsWatch({"server": self.tls, "client": self._peer_tls}, self._log)
        # The ledger outlives the sessions, whose end is an end for what they still held.
        async with (
            watch.running(self.metrics_registry),
            self._tracing.running(),
            self._tokenizers.encoding(),
            self._store.running(self._log),
            self._books.running(),
            self._sharing.running() if self._sharing else contextlib.nullcontext(),
            self._exchange.running(),
            self._sessions.running(),
            background(kept),
        ):
            yield

    def _new_sharing(self, books: Books) -> LimitSharing | None:
        if self._store.limits is None:
            return None
        return LimitSharing(
            self._store.limits,
            books,
            self._instance_id,
            clock=self._clock,
            log=self._log,
            lease_s=self._config.lease_s,
        )

    def _new_key_cache(self) -> KeyCache:
        return KeyCache(
            self._store.keys,
            max_age_s=self._config.keys_max_age_s,
            patience_s=self._config.redis_timeout_s,
            on_revoked=self._end_revoked,
            on_change=self._on_change,
            clock=self._clock,
            log=self._log,
        )

    def _listen(self) -> None:
        if self._store.shared is not None:
            self._store.shared.news.listen(KEYS_CHANNEL, lambda _: self._keys.wake())

    def _new_tokenizers(self) -> Tokenizers:
        return Tokenizers(
            self._config.tokenizers,
            self.registry,
            tls=self._peer_tls,
            patience_s=self._config.tokenizer_patience_s,
            on_change=self._on_change,
            on_new_vocabulary=self._end_encoded,
            clock=self._clock,
            log=self._log,
        )

    def _new_sessions(self) -> WorkerSessions:
        leases = self._store.leases if self._store.shared else None
        sources = worker_sources(self._config.workers, leases)
        return WorkerSessions(sources, self._new_session, self.registry.has, self._log)

    def _new_session(self, address: str) -> Run:
        session = WorkerSession(
            address,
            self._instance_id,
            self.registry,
            tls=self._peer_tls,
            limits=SilenceLimits(self._config.load_ttl_s, self._config.stall_min_s),
            dispatch=self._dispatcher.dispatch,
            on_change=self._on_change,
            clock=self._clock,
            log=self._log,
        )
        return session.run

    def _new_servicer(self, seed_source: Callable[[], int]) -> ChatServicer:
        chats = Chats(
            text=self._tokenizers,
            registry=self.registry,
            queue=self._queue,
            limiter=self._limiter,
            dispatcher=self._dispatcher,
            seed_source=seed_source,
            cache_secret=self._config.cache_secret.encode() or secrets.token_bytes(32),
            ledger=self._books.ledger,
        )
        usage = UsageReports(self._store.ledger)
        return ChatServicer(chats, self._calls, self._exchange.elsewhere, usage)

    def _new_calls(self) -> Calls:
        return Calls(
            self._keys,
            self._admission,
            self._live,
            new_request_id=lambda: new_request_id(self._instance_id),
            default_deadline_s=self._config.default_deadline_s,
            begin_trace=self._tracing.begin,
            on_end=self._on_end,
            on_late=self._metrics.on_late,
            on_refused=self._metrics.on_refused,
            clock=self._clock,
            log=self._log,
        )

    def _new_fleet(self) -> Fleet:
        return Fleet(
            self._instance_id,
            lambda: self._sessions.known,
            self.registry,
            self._tokenizers,
            self._queue,
            self._config.max_queued_requests,
            self._live,
            self._store,
            self._ready.is_set,
            begun_at=self._clock(),
            clock=self._clock,
            log=self._log,
        )

    def _new_loops(self, keys_file: KeysFile | None) -> Loops:
        return Loops(
            self._config,
            keys_file=keys_file,
            new_keys_file=lambda: _keys_file(self._config),
            keys=self._keys,
            file_keys=self._store.file_keys,
            live=self._live,
            dispatcher=self._dispatcher,
            stalls=StallWatch(self.registry, self._dispatcher.dispatch, self._clock),
            ready=self._ready,
            changed=self._changed,
            log=self._log,
        )

    def _on_end(self, record: RequestRecord) -> None:
        self._metrics.on_end(record)
        self._tracing.on_end(record)
        self._exchange.keep(record)

    def _end_revoked(self, key_ids: frozenset[str]) -> None:
        error = RequestError(Reason.KEY_REVOKED, "the API key was revoked")
        ended = self._live.interrupt_keys(key_ids, error)
        self._log.info("keys_revoked", key_ids=sorted(key_ids), requests_ended=ended)

    def _end_encoded(self, models: frozenset[str]) -> None:
        """End these models' requests, wherever they are: their ids' vocabulary is gone."""
        changed = "the tokenizer came back with another vocabulary"
        self._live.interrupt_all(RequestError(Reason.TOKENIZER_LOST, changed), models)

    def _on_change(self) -> None:
        """A worker or a tokenizer came or went, keys became known, or the drain began."""
        usable = {w.figures.model for w in self.registry if self.registry.understands(w)}
        is_served = self._keys.is_usable and any(map(self._tokenizers.is_up, usable))
        if self._admission.is_open and is_served:
            self._ready.set()
        else:
            self._ready.clear()
        self._changed.set()
        self._dispatcher.dispatch()


def _keys_file(config: RouterConfig) -> KeysFile | None:
    methods = chat_pb2.DESCRIPTOR.services_by_name["ChatService"].methods_by_name
    return KeysFile(config.keys_file, frozenset(methods)) if config.keys_file else None


def _first_keys(config: RouterConfig, file: KeysFile | None) -> Keys | None:
    """None if keys are in Redis. Raises KeysFormatError: without any there is nobody to serve."""
    if file is not None:
        return file.poll() or {}
    if config.api_key_sha256:
        return {config.api_key_sha256.lower(): ApiKey(Tenant("default"))}
    return None


@contextlib.asynccontextmanager
async def running_router(
    config: RouterConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    seed_source: Callable[[], int] = random_seed,
    log: structlog.typing.FilteringBoundLogger | None = None,
) -> AsyncIterator[Router]:
    """Serve until the block ends; calls still open then are cut off.

    Raises OSError if the address cannot be bound, KeysFormatError for an unusable keys file,
    StoreURLError for an unusable URL of Redis, TlsFileError for unusable certificates,
    PricesError for an unusable file of prices, TracingMissingError for a collector without its
    packages.
    """
    log = log or structlog.get_logger(service="router")
    keys_file = _keys_file(config)
    first_keys, timeout_s = _first_keys(config, keys_file), config.redis_timeout_s
    prices = read_prices(config.prices_file)
    kept = Retention(config.usage_row_days, config.usage_days)
    async with open_store(
        config.redis_url, log, first_keys, timeout_s=timeout_s, retention=kept
    ) as store:
        router = Router(
            config, store, keys_file, prices, clock=clock, seed_source=seed_source, log=log
        )
        async with _serving(router, config):
            yield router


@contextlib.asynccontextmanager
async def _serving(router: Router, config: RouterConfig) -> AsyncIterator[None]:
    ageing = connection_age(config.max_connection_age_s)
    async with running_server(
        router.add_services,
        SERVICE_NAMES,
        config.listen,
        options=ageing,
        guard=router.guard(),
        tls=router.tls,
    ) as server:
        router.address = server.address
        async with (
            router.running(server),
            serving_metrics(config.metrics_listen, router.metrics_registry) as address,
        ):
            router.metrics_address = address
            yield
