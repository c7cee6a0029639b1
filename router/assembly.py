"""All parts of one router, and how they hang together."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable

import grpc
import structlog

from noria.reasons import Reason, RequestError
from noria.service.log import loop_end
from noria.service.metrics import new_registry
from noria.service.server import RunningServer
from noria.service.tasks import keep_running
from noria.service.tls_files import opened
from noria.service.tls_watch import TlsWatch
from noria.v1 import admin_pb2_grpc, chat_pb2_grpc
from router.access import Access
from router.admin_servicer import AdminServicer
from router.bookkeeping import Bookkeeping
from router.calls import Admission, Calls
from router.chat import Chats
from router.config import RouterConfig
from router.connection import background
from router.dispatch import Dispatcher
from router.downstream import Downstream
from router.exchange import exchange
from router.fleet import Fleet
from router.keys_file import KeysFile
from router.ledger.prices import Prices
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
from router.store.opened import Store
from router.token_stream import TokenStream
from router.tracing import new_tracing
from router.usage import UsageReports

# How long workers have to tell of the last requests, and how often it is looked whether they did.
_TELL_S, _POLL_S = 1.0, 0.02


class Router:
    """What runs, in which order it starts, and how it stops; `running_router` makes one.

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
        self._ready = asyncio.Event()
        self._changed = asyncio.Event()
        self.access = Access(
            config, store, self._live, keys_file,
            on_change=self._on_change, clock=clock, log=log,
        )  # fmt: skip
        self._keys = self.access.keys
        self._downstream = self._new_downstream()
        self._tokenizers = self._downstream.tokenizers
        self._sessions = self._downstream.sessions
        self._calls = self._new_calls()
        self._servicer = self._new_servicer(seed_source)
        self._admin = AdminServicer(self.access.admin, self._new_fleet(), self._calls)
        self._loops = self._new_loops()

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

    def add_services(self, server: grpc.aio.Server) -> None:
        """Register what clients and operators call."""
        chat_pb2_grpc.add_ChatServiceServicer_to_server(self._servicer, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, server)

    @contextlib.asynccontextmanager
    async def running(self, server: RunningServer) -> AsyncIterator[None]:
        """Do inside the block what is done beside answering calls."""
        await self.access.begin()
        tokenizers = [each.run for each in self._tokenizers]
        loops = [*tokenizers, *self.access.loops(), *self._exchange.loops, *self._loops.all(server)]
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

    def _new_downstream(self) -> Downstream:
        return Downstream(
            self._config,
            self._instance_id,
            self.registry,
            self._store.leases if self._store.shared else None,
            tls=self._peer_tls,
            dispatch=self._dispatcher.dispatch,
            on_change=self._on_change,
            on_new_vocabulary=self._end_encoded,
            clock=self._clock,
            log=self._log,
        )

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

    def _new_loops(self) -> Loops:
        return Loops(
            self._config,
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

    def _end_encoded(self, models: frozenset[str]) -> None:
        """End these models' requests, wherever they are: their ids' vocabulary is gone."""
        changed = "the tokenizer came back with another vocabulary"
        self._live.interrupt_all(RequestError(Reason.TOKENIZER_LOST, changed), models)

    def _on_change(self) -> None:
        """A worker or a tokenizer came or went, keys became known, or the drain began."""
        can_serve = self._keys.is_usable and self._downstream.can_serve()
        if self._admission.is_open and can_serve:
            self._ready.set()
        else:
            self._ready.clear()
        self._changed.set()
        self._dispatcher.dispatch()
