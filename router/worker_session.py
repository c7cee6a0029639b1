"""One bidirectional stream to one worker, opened again whenever it breaks.

Submits and aborts go out in order through one outbox; each step that comes in is
handed out synchronously. A session that ends takes its `WorkerState` with it: a new
one begins empty, whether the worker is the same or another instance.
"""

from collections.abc import Callable

import grpc
import structlog

from noria.service.outbox import Outbox
from noria.service.protocol import PROTOCOL_VERSION
from noria.service.tls import aio_channel, break_cause
from noria.service.tls_files import TlsSource
from noria.v1 import worker_pb2, worker_pb2_grpc
from router import wire_worker
from router.connection import (
    SESSION_OPTIONS,
    SessionRefusedError,
    keep_connected,
    writing,
)
from router.registry import Registry
from router.requests import Generation
from router.worker_news import Finish, Refusal
from router.worker_state import SilenceLimits, WorkerState


class WorkerSession:
    """Keeps one worker connected and in the registry.

    `dispatch` is called after every message, since it may have made room, `on_change`
    when the worker comes or goes.
    """

    def __init__(
        self,
        address: str,
        router_instance_id: str,
        registry: Registry,
        *,
        tls: TlsSource | None,
        limits: SilenceLimits,
        dispatch: Callable[[], None],
        on_change: Callable[[], None],
        clock: Callable[[], float],
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._address = address
        self._router_instance_id = router_instance_id
        self._registry = registry
        self._tls = tls
        self._limits = limits
        self._dispatch = dispatch
        self._on_change = on_change
        self._clock = clock
        self._log = log.bind(worker_id=address)
        self._outbox: Outbox[worker_pb2.SessionRequest] = _new_outbox()
        self._last_break = ""

    async def run(self) -> None:
        """Stay connected until cancelled."""
        await keep_connected(self._connect, self._on_break)

    def submit(self, generation: Generation, attempt: int, submit_number: int) -> None:
        self._outbox.put(wire_worker.submit(generation, attempt, submit_number, self._clock()))

    def abort(self, submit_number: int) -> None:
        self._outbox.put(
            worker_pb2.SessionRequest(abort=worker_pb2.Abort(submit_number=submit_number))
        )

    def abort_choice(self, submit_number: int, choice: int) -> None:
        abort = worker_pb2.AbortChoice(submit_number=submit_number, choice=choice)
        self._outbox.put(worker_pb2.SessionRequest(abort_choice=abort))

    def set_draining(self, draining: bool) -> None:
        told = worker_pb2.SetDraining(draining=draining)
        self._outbox.put(worker_pb2.SessionRequest(set_draining=told))

    async def _connect(self) -> None:
        async with aio_channel(self._address, self._tls, SESSION_OPTIONS) as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Session()
            self._outbox = _new_outbox()
            self._outbox.put(self._hello())
            async with writing(call, self._outbox, lambda request: request):
                # A worker that still loads answers once it is ready.
                worker = self._welcome(await call.read())
                await self._serve(call, worker)

    async def _serve(
        self,
        call: grpc.aio.StreamStreamCall[worker_pb2.SessionRequest, worker_pb2.SessionResponse],
        worker: WorkerState,
    ) -> None:
        self._registry.add(worker)
        self._connected(worker)
        try:
            while isinstance(response := await call.read(), worker_pb2.SessionResponse):
                self._receive(worker, response)
        finally:
            self._registry.remove(worker)
            worker.close()
            self._on_change()

    def _hello(self) -> worker_pb2.SessionRequest:
        hello = worker_pb2.RouterHello(
            protocol_version=PROTOCOL_VERSION, router_instance_id=self._router_instance_id
        )
        return worker_pb2.SessionRequest(hello=hello)

    def _welcome(self, response: object) -> WorkerState:
        if not isinstance(response, worker_pb2.SessionResponse) or not response.HasField("hello"):
            raise SessionRefusedError("the worker's first message is no hello")
        version = response.hello.protocol_version
        if abs(version - PROTOCOL_VERSION) > 1:
            raise SessionRefusedError(
                f"the worker speaks protocol {version}, this router {PROTOCOL_VERSION}"
            )
        figures = wire_worker.worker_figures(response.hello)
        return WorkerState(self._address, figures, self, self._limits)

    def _connected(self, worker: WorkerState) -> None:
        self._last_break = ""
        figures = worker.figures
        self._log.info("worker_connected", model=figures.model, instance_id=figures.instance_id)
        ours, theirs = self._registry.vocabulary(figures.model), figures.vocab_fingerprint
        if ours is not None and ours != theirs:
            self._log.error("vocabulary_mismatch", tokenizer=ours, worker=theirs)
        self._on_change()

    def _receive(self, worker: WorkerState, response: worker_pb2.SessionResponse) -> None:
        if response.HasField("step"):
            self._receive_step(worker, response.step)
        elif response.HasField("load"):
            worker.report(wire_worker.load_report(response.load, self._clock()))
        self._dispatch()

    def _receive_step(self, worker: WorkerState, step: worker_pb2.Step) -> None:
        if step.HasField("load"):
            worker.report(wire_worker.load_report(step.load, self._clock()))
        finishes = wire_worker.finishes_of(step)
        for delta in step.deltas:
            number = delta.submit_number
            worker.deliver(number, wire_worker.new_tokens(delta, finishes.get(number, ())))
        for terminal in step.terminals:
            self._receive_terminal(worker, terminal, finishes)

    def _receive_terminal(
        self,
        worker: WorkerState,
        terminal: worker_pb2.Terminal,
        finishes: dict[int, tuple[Finish, ...]],
    ) -> None:
        number = terminal.submit_number
        if number in finishes:
            worker.finish(number, finishes[number], wire_worker.worker_report(terminal.finished))
        else:
            refused = terminal.refused
            refusal = wire_worker.refusal_of(refused.code)
            if refusal is Refusal.INTERNAL:
                self._log_failure(worker, number)
            work = wire_worker.work_before(refused)
            worker.refuse(number, refusal, refused.message, refused.field, work)

    def _log_failure(self, worker: WorkerState, submit_number: int) -> None:
        """Say that a worker failed a request, without its message: it may quote anything."""
        attempt = worker.attempts.get(submit_number)
        if attempt is not None:
            generation = attempt.stream.generation
            self._log.warning(
                "worker_failed_request",
                request_id=generation.request_id,
                trace_id=generation.trace_id,
            )

    def _on_break(self, error: Exception | None) -> None:
        """Log each new kind of break once, not every failed attempt to come back."""
        if isinstance(error, grpc.aio.AioRpcError):
            cause = break_cause(error)
        elif isinstance(error, SessionRefusedError):
            cause = str(error)
        else:
            cause = type(error).__name__ if error else "closed by the worker"
        if cause != self._last_break:
            self._log.warning("worker_disconnected", cause=cause)
        self._last_break = cause


def _new_outbox() -> Outbox[worker_pb2.SessionRequest]:
    return Outbox(lambda last, new: False)
