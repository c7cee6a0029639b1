"""A chat service on loopback that does what a test tells it."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc

from noria.reasons import RequestError
from noria.service.channel import SERVER_OPTIONS
from noria.service.errors import DETAILS_KEY, STATUS_OF, status_details
from noria.v1 import chat_pb2, chat_pb2_grpc, common_pb2

REQUEST_ID = "req-1"


def text_event(text, choice=0):
    delta = chat_pb2.ContentBlockDelta(index=0, text=text)
    return chat_pb2.StreamEvent(choice=choice, content_block_delta=delta)


def answer_events(*pieces, stop_sequence=None):
    """The events of a served answer with these pieces of text."""
    usage = common_pb2.Usage(input_tokens=7, cached_tokens=2, output_tokens=len(pieces) + 1)
    start = chat_pb2.MessageStart(request_id=REQUEST_ID, model="fake")
    yield chat_pb2.StreamEvent(message_start=start)
    yield chat_pb2.StreamEvent(content_block_start=chat_pb2.ContentBlockStart())
    for piece in pieces:
        yield text_event(piece)
    yield chat_pb2.StreamEvent(content_block_stop=chat_pb2.ContentBlockStop())
    end = chat_pb2.MessageDelta(
        stop_reason=chat_pb2.STOP_REASON_STOP_SEQUENCE
        if stop_sequence
        else chat_pb2.STOP_REASON_END_TURN,
        stop_sequence=stop_sequence,
        usage=usage,
        timeline=common_pb2.Timeline(request_id=REQUEST_ID, total_us=5, attempts=1),
    )
    yield chat_pb2.StreamEvent(message_delta=end)
    yield chat_pb2.StreamEvent(message_stop=chat_pb2.MessageStop())


def refuse(context, error: RequestError):
    """End a call the way the router does."""
    details = status_details(error, REQUEST_ID)
    context.set_trailing_metadata(((DETAILS_KEY, details),))
    context.abort(STATUS_OF[error.reason], error.message)


@dataclass
class FakeChat(chat_pb2_grpc.ChatServiceServicer):
    """Answers with `events`; `specs`, `metadata` and `cancelled_ids` tell what arrived."""

    events: Callable = lambda _spec, _context: answer_events("Yes", ",", " it is.")
    specs: list = field(default_factory=list)
    metadata: list = field(default_factory=list)
    deadlines: list = field(default_factory=list)
    cancelled_ids: list = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    def _note(self, request, context):
        self.specs.append(request.spec)
        self.metadata.append(dict(context.invocation_metadata()))
        self.deadlines.append(context.time_remaining())
        context.add_callback(self.ended.set)
        context.send_initial_metadata((("noria-request-id", REQUEST_ID),))

    def StreamChat(self, request, context):  # noqa: N802 - the method's name on the wire
        self._note(request, context)
        for event in self.events(request.spec, context):
            yield chat_pb2.StreamChatResponse(event=event)

    def Chat(self, request, context):  # noqa: N802
        self._note(request, context)
        events = list(self.events(request.spec, context))
        end = next(e.message_delta for e in events if e.HasField("message_delta"))
        text = "".join(e.content_block_delta.text for e in events)
        block = chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text=text))
        choice = chat_pb2.Choice(content=[block], stop_reason=end.stop_reason, usage=end.usage)
        return chat_pb2.ChatResponse(
            request_id=REQUEST_ID, model="fake", choices=[choice],
            usage=end.usage, timeline=end.timeline,
        )  # fmt: skip

    def CancelRequest(self, request, context):  # noqa: N802
        self.cancelled_ids.append(request.request_id)
        return chat_pb2.CancelRequestResponse()

    def hold(self, *pieces):
        """Send these pieces, then nothing until the call ends."""

        def events(_spec, _context):
            for piece in pieces:
                yield text_event(piece)
            self.ended.wait(30)

        self.events = events


@contextlib.contextmanager
def serving(chat: FakeChat) -> Iterator[FakeChat]:
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool, options=SERVER_OPTIONS)
        chat_pb2_grpc.add_ChatServiceServicer_to_server(chat, server)
        chat.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield chat
        finally:
            chat.ended.set()
            server.stop(0).wait()
