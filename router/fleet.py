"""What this router knows of the fleet, on the wire, and the order to drain a worker."""

import asyncio
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from noria.reasons import Reason, RequestError, invalid_field
from noria.v1 import admin_pb2, common_pb2
from router.condition import Condition, condition_of
from router.live import LiveRequest, LiveRequests
from router.queue import RequestQueue
from router.registry import Registry
from router.store.opened import Store
from router.token_stream import TokenStream
from router.tokenizers import Tokenizers
from router.worker_state import WorkerState

CONFIRM_S = 5.0
_LOOK_S = 0.02
_DEFAULT_REQUESTS, _MAX_REQUESTS = 1000, 10_000
_UNREACHABLE = admin_pb2.WORKER_STATE_UNREACHABLE


@dataclass(frozen=True, slots=True)
class Fleet:
    """Reads the router's own parts; call it on the event loop.

    `known` gives the addresses of workers that were found, connected or not, `is_ready` whether
    this router is.
    """

    instance_id: str
    known: Callable[[], Iterable[str]]
    registry: Registry
    tokenizers: Tokenizers
    queue: RequestQueue[TokenStream]
    max_queued_requests: int
    live: LiveRequests
    store: Store
    is_ready: Callable[[], bool]
    begun_at: float
    clock: Callable[[], float]
    log: structlog.typing.FilteringBoundLogger

    def status(self) -> admin_pb2.GetFleetResponse:
        """Everything at this moment."""
        return admin_pb2.GetFleetResponse(
            router=self._router(),
            models=self._models(),
            workers=self._workers(),
            tokenizers=[
                admin_pb2.TokenizerStatus(
                    address=each.address,
                    model=each.facts.model,
                    up=each.is_up,
                    open_outputs=each.slots.num_slots,
                )
                for each in sorted(self.tokenizers, key=lambda each: each.address)
            ],
            store=admin_pb2.StoreStatus(
                shared=self.store.shared is not None, up=self.store.available
            ),
        )

    def requests(self, asked: admin_pb2.ListRequestsRequest) -> admin_pb2.ListRequestsResponse:
        """Raises INVALID_FIELD."""
        limit = asked.limit if asked.HasField("limit") else _DEFAULT_REQUESTS
        if not 1 <= limit <= _MAX_REQUESTS:
            raise invalid_field("limit", f"{limit}; from 1 to {_MAX_REQUESTS}")
        found = [
            each
            for each in self.live
            if asked.tenant in ("", each.tenant.name) and asked.model in ("", each.record.model)
        ]
        told = [_live_request(each) for each in found[:limit]]
        return admin_pb2.ListRequestsResponse(requests=told, total=len(found))

    async def drain(
        self, worker_id: str, *, draining: bool, by: str
    ) -> admin_pb2.DrainWorkerResponse:
        """Order it, and wait until the worker says so. Raises INVALID_FIELD, NO_WORKER."""
        worker = self._connected(worker_id)
        self.log.info("worker_drain_ordered", worker_id=worker_id, draining=draining, by=by)
        worker.set_draining(draining)
        try:
            async with asyncio.timeout(CONFIRM_S):
                # A load tells it, which replaces another: there is no event to wait for.
                while worker.load is None or worker.is_draining is not draining:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            problem = f"{worker_id} has not confirmed it in {CONFIRM_S:g} s; it may be stopping"
            raise RequestError(Reason.NO_WORKER, problem) from None
        return admin_pb2.DrainWorkerResponse(
            worker=self._worker(worker), others_ready=self._others_ready(worker)
        )

    def _connected(self, worker_id: str) -> WorkerState:
        workers = {worker.worker_id: worker for worker in self.registry}
        if worker_id not in workers:
            there = ", ".join(sorted(workers)) or "none"
            raise invalid_field("worker_id", f"no such worker is connected; there are {there}")
        return workers[worker_id]

    def _others_ready(self, worker: WorkerState) -> int:
        now, model = self.clock(), worker.figures.model
        return sum(
            condition_of(other, self.registry, now) is Condition.READY
            for other in self.registry
            if other is not worker and other.figures.model == model
        )

    def _router(self) -> admin_pb2.RouterStatus:
        return admin_pb2.RouterStatus(
            instance_id=self.instance_id,
            version=_version(),
            uptime_s=self.clock() - self.begun_at,
            ready=self.is_ready(),
            live_requests=len(self.live),
            queued_requests=self.queue.num_requests,
            max_queued_requests=self.max_queued_requests,
        )

    def _models(self) -> Iterable[admin_pb2.ModelStatus]:
        aliases: dict[str, set[str]] = {model: set() for model in self.queue.models()}
        for worker in self.registry:
            aliases.setdefault(worker.figures.model, set()).update(worker.figures.aliases)
        for model in sorted(aliases):
            waiting = self.queue.waiting_for(model)
            yield admin_pb2.ModelStatus(
                name=model,
                aliases=sorted(aliases[model] - {model}),
                queued_requests=len(waiting),
                queued_tokens=sum(permit.tokens for permit in waiting),
            )

    def _workers(self) -> Iterable[admin_pb2.WorkerStatus]:
        connected = sorted(self.registry, key=lambda each: (each.figures.model, each.worker_id))
        yield from map(self._worker, connected)
        for worker_id in sorted(set(self.known()) - {w.worker_id for w in connected}):
            yield admin_pb2.WorkerStatus(worker_id=worker_id, state=_UNREACHABLE)

    def _worker(self, worker: WorkerState) -> admin_pb2.WorkerStatus:
        now, figures = self.clock(), worker.figures
        condition = condition_of(worker, self.registry, now)
        status = admin_pb2.WorkerStatus(
            worker_id=worker.worker_id,
            instance_id=figures.instance_id,
            model=figures.model,
            state=admin_pb2.WorkerState.Value(f"WORKER_STATE_{condition.name}"),
            max_num_seqs=figures.max_num_seqs,
            num_blocks=figures.num_blocks,
            block_size=figures.block_size,
            step_age_s=worker.step_age_s(now),
            own_requests=len(worker.attempts),
            breaker=admin_pb2.BreakerState.Value(f"BREAKER_STATE_{worker.breaker.state(now).name}"),
        )
        if worker.load is not None:
            status.running, status.waiting = worker.load.running, worker.load.waiting
            status.free_blocks = worker.load.free_blocks
            status.cached_blocks = worker.load.cached_blocks
            # A worker that has nothing to do reports the pace of its last steps.
            status.tokens_per_second = worker.load.tokens_per_second if worker.load.running else 0
        return status


def _live_request(request: LiveRequest) -> admin_pb2.LiveRequest:
    record = request.record
    return admin_pb2.LiveRequest(
        request_id=record.request_id,
        tenant=request.tenant.name,
        key_id=request.key_id,
        method=record.method,
        model=record.model,
        phase=common_pb2.PhaseKind.Value(f"PHASE_KIND_{record.timeline.phase.name}"),
        age_s=record.timeline.elapsed_us() / 1e6,
        input_tokens=record.input_tokens,
        output_tokens=record.output_tokens,
        worker_id=record.worker_id,
        attempts=record.attempts,
    )


def _version() -> str:
    try:
        return importlib.metadata.version("noria")
    except importlib.metadata.PackageNotFoundError:
        return ""
