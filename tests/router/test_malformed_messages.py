"""A worker or tokenizer whose messages cannot be read is left and connected to again."""

import grpc
import structlog

from noria.v1 import tokenizer_pb2, worker_pb2
from tests.router.fakes import (
    EOS,
    FakeTokenizer,
    FakeWorker,
    events,
    kinds,
    routed,
    texts,
    until,
)

BROKEN = b"\xff" * 100


class RawWorker(FakeWorker):
    """A worker that can send bytes as they are."""

    def add_to(self, server):
        sessions(server, "WorkerService", "Session", self.Session, worker_pb2.SessionRequest)

    def send(self, message):
        self._outbox.put_nowait(message)


class RawTokenizer(FakeTokenizer):
    """A tokenizer that answers the next batch with bytes that are no message."""

    broken = False

    def add_to(self, server):
        super().add_to(server)
        requests = tokenizer_pb2.DecodeSessionRequest
        sessions(server, "TokenizerService", "DecodeSession", self.DecodeSession, requests)

    def _texts(self, request):
        if self.broken and request.HasField("batch"):
            self.broken = False
            raise BrokenError
        yield from super()._texts(request)

    async def _read(self, requests, context):
        try:
            await super()._read(requests, context)
        except BrokenError:
            await context.write(BROKEN)
            await super()._read(requests, context)


class BrokenError(Exception):
    pass


def sessions(server, service, method, handle, request):
    """Serve a session whose answers are messages or bytes."""
    handler = grpc.stream_stream_rpc_method_handler(
        handle,
        request_deserializer=request.FromString,
        response_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
    )
    handlers = grpc.method_handlers_generic_handler(f"noria.v1.{service}", {method: handler})
    server.add_generic_rpc_handlers((handlers,))


async def test_a_worker_that_sends_no_message_is_connected_to_again():
    """What had not begun there is placed again; the log says so."""
    with structlog.testing.capture_logs() as lines:
        async with routed(RawWorker()) as setup:
            call = setup.stream()
            await setup.submitted(1)
            setup.worker.send(BROKEN)
            again = await setup.submitted(2)
            setup.worker.finish(again.submit_number, "eos", EOS)
            assert kinds(await events(call))[-1] == "message_stop"
    assert "worker_disconnected" in {line["event"] for line in lines}


async def test_a_tokenizer_that_sends_no_message_is_connected_to_again():
    """The text goes on where it was, without a gap."""
    tokenizer = RawTokenizer()
    async with routed(tokenizer=tokenizer) as setup:
        call = setup.stream()
        await setup.submitted(1)
        setup.worker.emit(1, 10)
        await until(lambda: tokenizer.opened)
        tokenizer.broken = True
        setup.worker.emit(1, 11)
        await until(lambda: len(tokenizer.opened) == 2)
        setup.worker.finish(1, "eos", EOS)
        assert "".join(texts(await events(call))) == " 10 11"
