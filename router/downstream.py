"""The services behind one router: its tokenizers, and the workers that it finds."""

from collections.abc import Callable

import structlog

from noria.service.tls_files import TlsSource
from router.config import RouterConfig
from router.discovery import worker_sources
from router.registry import Registry
from router.store.base import LeaseStore
from router.tokenizers import Tokenizers
from router.worker_session import WorkerSession
from router.worker_sessions import Run, WorkerSessions
from router.worker_state import SilenceLimits


class Downstream:
    """`leases` are those of workers, None where they have none.

    `dispatch` is called whenever there may be room, `on_change` when a service comes or goes,
    `on_new_vocabulary` with the models whose ids mean something else from now on.
    """

    def __init__(
        self,
        config: RouterConfig,
        instance_id: str,
        registry: Registry,
        leases: LeaseStore | None,
        *,
        tls: TlsSource | None,
        dispatch: Callable[[], None],
        on_change: Callable[[], None],
        on_new_vocabulary: Callable[[frozenset[str]], None],
        clock: Callable[[], float],
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._config = config
        self._instance_id = instance_id
        self._registry = registry
        self._tls = tls
        self._dispatch = dispatch
        self._on_change = on_change
        self._clock = clock
        self._log = log
        self.tokenizers = Tokenizers(
            config.tokenizers,
            registry,
            tls=tls,
            patience_s=config.tokenizer_patience_s,
            on_change=on_change,
            on_new_vocabulary=on_new_vocabulary,
            clock=clock,
            log=log,
        )
        sources = worker_sources(config.workers, leases)
        self.sessions = WorkerSessions(sources, self._new_session, registry.has, log)

    def can_serve(self) -> bool:
        """Whether some model has a usable worker and a connected tokenizer."""
        understood = filter(self._registry.understands, self._registry)
        return any(self.tokenizers.is_up(worker.figures.model) for worker in understood)

    def _new_session(self, address: str) -> Run:
        session = WorkerSession(
            address,
            self._instance_id,
            self._registry,
            tls=self._tls,
            limits=SilenceLimits(self._config.load_ttl_s, self._config.stall_min_s),
            dispatch=self._dispatch,
            on_change=self._on_change,
            clock=self._clock,
            log=self._log,
        )
        return session.run
