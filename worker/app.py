"""One running worker: server, engine thread and sessions put together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import grpc
import structlog

from noria.service.log import loop_end
from noria.service.metrics import new_registry, serving_metrics
from noria.service.server import RunningServer, running_server
from noria.service.tasks import keep_running
from noria.service.tls_files import TlsSource, opened
from noria.service.tls_watch import TlsWatch
from noria.v1 import worker_pb2_grpc
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.engine_output import EngineOutput
from worker.engine_thread import EngineThread
from worker.grammar.compiler import GrammarCompiler, max_live
from worker.grammar.tokens import TokenTable
from worker.lease import Lease, worker_lease
from worker.metrics import WorkerMetrics, WorkerState
from worker.servicer import WorkerServicer
from worker.session_hub import SessionHub
from worker.translate import Origin

if TYPE_CHECKING:
    from worker.build import WorkerFacts

SERVICE = "noria.v1.WorkerService"
# A step that takes longer than this has hung: restarting the process would help.
STEP_LIMIT_S = 120.0
WATCH_S = 1.0
_POLL_S = 0.05
_JOIN_S = 5.0


class RunningWorker:
    """A worker whose address is known. It answers sessions once `ready` returns."""

    def __init__(
        self,
        server: RunningServer,
        servicer: WorkerServicer,
        thread: "EngineThread[WorkerFacts]",
        config: WorkerConfig,
        lease: Lease,
    ) -> None:
        self.address = server.address
        self.metrics_address = ""
        self.registry = new_registry()
        self._metrics = WorkerMetrics(self.registry, self.state)
        self._config = config
        self._server = server
        self._servicer = servicer
        self._thread = thread
        self._lease = lease
        self._hub: SessionHub | None = None
        self._facts: WorkerFacts | None = None

    async def ready(self) -> "WorkerFacts":
        """Wait until the engine stands, then serve. Raises what building it raised."""
        facts = self._facts = await asyncio.wrap_future(self._thread.ready)
        info = facts.info
        origin = Origin(info.hidden_size, info.attention_backend, info.hello.row_exact)
        self._hub = SessionHub(self._thread, facts.limits, origin, pieces=facts.pieces)
        self._servicer.start(self._hub, facts.info)
        await self._server.set_ready(True)
        self._lease.begin()
        return facts

    async def crashed(self) -> BaseException:
        """Wait for the engine's end by a defect; it never comes otherwise."""
        return await asyncio.wrap_future(self._thread.crashed)

    async def drain(self, grace_s: float) -> int:
        """Take nothing new, let submits finish for `grace_s`; how many are left then."""
        await self._server.set_ready(False)
        await self._lease.leave()
        if self._hub is None:
            return 0
        self._hub.stopping = True
        for _ in range(round(grace_s / _POLL_S)):
            if self._hub.num_live == 0:
                break
            await asyncio.sleep(_POLL_S)
        return self._hub.num_live

    def deliver(self, output: EngineOutput) -> None:
        """Pass an engine output on to its sessions; on the event loop."""
        self._metrics.observe(output)
        if self._hub is not None:
            self._hub.deliver(output)

    def state(self) -> WorkerState:
        """What this worker holds now."""
        if self._hub is None or self._facts is None:
            return WorkerState(max_num_seqs=self._config.max_num_seqs)
        pool, about = self._facts.scheduler.pool, self._facts.info
        return WorkerState(
            load=self._thread.load,
            max_num_seqs=self._config.max_num_seqs,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            live_submits=self._hub.num_live,
            step_age_s=self._thread.step_age_s(),
            draining=self._hub.draining,
            accounts=self._hub.accounts,
            about=(
                ("model", self._config.name),
                ("attention_backend", about.attention_backend),
                ("dtype", about.dtype),
            ),
        )

    async def watch_steps(self) -> None:
        """Keep the health name `live` true to the engine's heartbeat."""
        while True:
            await self._server.set_live(self._thread.step_age_s() < STEP_LIMIT_S)
            await asyncio.sleep(WATCH_S)


@contextlib.asynccontextmanager
async def running_worker(
    config: WorkerConfig,
    *,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    on_failure: Callable[[Exception], None] = lambda failure: None,
) -> AsyncIterator[RunningWorker]:
    """Listen at once, load on the engine's thread. `on_progress` is called on that thread.

    On exit calls end first, the thread last, or not at all if its step hangs: the loop
    never waits for it, and whoever ends the process must not either. Raises TlsFileError for
    unusable certificates, ValueError for an unusable URL of Redis.
    """
    tls = opened(config.tls)
    servicer = WorkerServicer()
    loop = asyncio.get_running_loop()

    def add_services(server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)

    def build() -> "tuple[Engine, WorkerFacts]":
        return _built(config, thread, on_progress, compilers)

    def on_output(output: EngineOutput) -> None:
        if output.failure is not None:
            with structlog.contextvars.bound_contextvars(trace_ids=_failed_traces(output)):
                on_failure(output.failure)
        loop.call_soon_threadsafe(worker.deliver, output)

    thread = EngineThread(build, on_output)
    async with (
        contextlib.AsyncExitStack() as compilers,
        _started(thread),
        running_server(add_services, (SERVICE,), config.listen, tls=tls) as server,
        _lease(config, server.address) as lease,
    ):
        worker = RunningWorker(server, servicer, thread, config, lease)
        async with _attended(worker, tls, config.metrics_listen):
            yield worker


def _built(
    config: WorkerConfig,
    thread: "EngineThread[WorkerFacts]",
    on_progress: Callable[[str, int, int], None],
    compilers: contextlib.AsyncExitStack,
) -> "tuple[Engine, WorkerFacts]":
    """On the engine's thread. Its grammar compiler ends with `compilers`."""

    def progress(stage: str, done: int, total: int) -> None:
        thread.raise_if_stopping()
        on_progress(stage, done, total)

    def make_compiler(table: TokenTable) -> GrammarCompiler:
        most = max_live(config.max_num_seqs)
        return compilers.enter_context(GrammarCompiler(table, thread.wake, max_live=most))

    # Over a second: by now the service listens, and the router starts beside it.
    progress("importing torch", 0, 1)
    from worker.build import build_engine

    return build_engine(config, progress, make_compiler)


def _lease(config: WorkerConfig, address: str) -> AbstractAsyncContextManager[Lease]:
    log = structlog.get_logger(service="worker")
    return worker_lease(config.redis_url, config.advertise or address, log)


@contextlib.asynccontextmanager
async def _attended(
    worker: RunningWorker, tls: TlsSource | None, metrics_listen: str
) -> AsyncIterator[None]:
    """Meanwhile health follows the steps, certificates their files, and metrics are served."""
    log = structlog.get_logger(service="worker")
    watch = asyncio.create_task(keep_running(worker.watch_steps, loop_end(log)))
    try:
        async with (
            TlsWatch({"server": tls}, log).running(worker.registry),
            serving_metrics(metrics_listen, worker.registry) as address,
        ):
            worker.metrics_address = address
            yield
    finally:
        watch.cancel()


def _failed_traces(output: EngineOutput) -> list[str]:
    """Whose requests a failure has ended."""
    failed = {ended.sequence.trace_id for ended in output.ended if ended.failure}
    return sorted(failed - {""})


@contextlib.asynccontextmanager
async def _started(thread: "EngineThread[WorkerFacts]") -> AsyncIterator[None]:
    with thread:
        yield
    await asyncio.to_thread(thread.join, _JOIN_S)
