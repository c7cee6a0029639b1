"""WorkerService on the wire. It only translates; sessions and engine decide."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import structlog

from noria.reasons import RequestError
from noria.service import errors
from noria.service.limits import LOAD_INTERVAL_SECONDS, SESSION_STALL_SECONDS
from noria.service.outbox import OutboxClosedError
from noria.service.protocol import PROTOCOL_VERSION
from noria.service.tasks import first_of
from noria.v1 import worker_pb2, worker_pb2_grpc
from worker.session import Session, SessionProtocolError
from worker.session_hub import SessionHub

_HELLO_TIMEOUT_S = 10.0

SessionContext = grpc.aio.ServicerContext[worker_pb2.SessionRequest, worker_pb2.SessionResponse]


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Sessions and facts of one worker. Calls wait until the worker is `ready`."""

    def __init__(self) -> None:
        self._ready: asyncio.Future[tuple[SessionHub, worker_pb2.GetWorkerInfoResponse]]
        self._ready = asyncio.get_running_loop().create_future()

    def start(self, hub: SessionHub, info: worker_pb2.GetWorkerInfoResponse) -> None:
        """Begin to serve."""
        self._ready.set_result((hub, info))

    async def GetWorkerInfo(  # noqa: N802 - the wire's name
        self, request: worker_pb2.GetWorkerInfoRequest, context: object
    ) -> worker_pb2.GetWorkerInfoResponse:
        _, info = await asyncio.shield(self._ready)
        return info

    # A coroutine that writes, not a generator that yields: when a call is cancelled, a
    # suspended generator's context managers would close whenever it is collected.
    async def Session(  # type: ignore[override]  # noqa: N802 - the wire's name
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: SessionContext
    ) -> None:
        try:
            await self._check_hello(request_iterator, context)
            hub, info = await asyncio.shield(self._ready)
            await context.write(worker_pb2.SessionResponse(hello=info.hello))
            with hub.session() as session:
                await first_of(
                    _read(request_iterator, session),
                    _write(session, context.write),
                    _watch(session),
                )
        except SessionProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except RequestError as error:
            await errors.abort(context, error)

    async def _check_hello(
        self, requests: AsyncIterator[worker_pb2.SessionRequest], context: SessionContext
    ) -> None:
        try:
            first = await asyncio.wait_for(anext(requests), _HELLO_TIMEOUT_S)
        except (StopAsyncIteration, TimeoutError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session begins with hello")
        if not first.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session begins with hello")
        theirs = first.hello.protocol_version
        if abs(theirs - PROTOCOL_VERSION) > 1:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol version {theirs}; this worker speaks {PROTOCOL_VERSION}",
            )


async def _read(requests: AsyncIterator[worker_pb2.SessionRequest], session: Session) -> None:
    async for request in requests:
        match request.WhichOneof("message"):
            case "submit":
                session.submit(request.submit)
            case "abort":
                session.abort(request.abort.submit_number)
            case "abort_choice":
                session.abort_choice(
                    request.abort_choice.submit_number, request.abort_choice.choice
                )
            case "set_draining":
                session.set_draining(request.set_draining.draining)
                structlog.get_logger(service="worker").info(
                    "drain_ordered", draining=request.set_draining.draining
                )
            case _:
                # A second hello, or a message of a later version: nothing to do.
                pass


async def _write(
    session: Session, write: Callable[[worker_pb2.SessionResponse], Coroutine[Any, Any, None]]
) -> None:
    with contextlib.suppress(OutboxClosedError):
        while True:
            for message in await session.outbox.take():
                await write(message.to_proto())
                session.sent(message)


async def _watch(session: Session) -> None:
    """Report the load at least every half second; give up on a router that reads nothing."""
    while session.outbox.waiting_s() < SESSION_STALL_SECONDS:
        session.report_load()
        await asyncio.sleep(LOAD_INTERVAL_SECONDS)
