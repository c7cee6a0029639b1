"""A tokenizer and a worker whose every move a test makes, and a router between them."""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import pytest
from prometheus_client import generate_latest

from noria.reasons import RequestError
from noria.service import errors
from noria.v1 import (
    chat_pb2,
    chat_pb2_grpc,
    common_pb2,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from router.app import running_router
from router.assembly import Router
from router.config import RouterConfig
from tests.support.canary import API_KEY, CANARY, look

KEY = API_KEY
KEY_SHA256 = hashlib.sha256(KEY.encode()).hexdigest()
EOS = 2
# A client that reads nothing blocks its stream after some 64 KiB.
SMALL_WINDOW = (
    ("grpc.http2.lookahead_bytes", 65_536),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
FINISH = {
    "eos": worker_pb2.FINISH_REASON_EOS,
    "stop_id": worker_pb2.FINISH_REASON_STOP_ID,
    "length": worker_pb2.FINISH_REASON_LENGTH,
    "aborted": worker_pb2.FINISH_REASON_ABORTED,
    "expired": worker_pb2.FINISH_REASON_EXPIRED,
}


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Return as soon as the condition holds; fail if it does not within the timeout."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the conditions are other parts' plain state
            await asyncio.sleep(0.002)


class FakeClock:
    """Starts anywhere and moves only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeServer:
    """A servicer on loopback that can be stopped and started again on the same port."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def add_to(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        self.add_to(self._server)
        self.port = self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        """Cut every call off."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)


class Slot:
    """Decodes naively: all ids so far, one stop search, one hold-back."""

    def __init__(self, opened: tokenizer_pb2.DecodeOpen, text_of: Callable[[int], str]) -> None:
        self.opened = opened
        self.text_of = text_of
        self.ids = list(opened.output_token_ids)
        self.sent = 0
        self.stopped = False

    def news(self, *, flush: bool = False) -> tokenizer_pb2.DecodedText:
        whole = "".join(self.text_of(i) for i in self.ids)
        answer = tokenizer_pb2.DecodedText(
            slot=self.opened.slot, kind=tokenizer_pb2.BLOCK_KIND_TEXT, num_ids=len(self.ids)
        )
        end = self._end(whole, answer, flush)
        start = len(whole.encode()[: self.sent].decode())
        answer.byte_offset = self.sent
        answer.text = whole[start:end]
        answer.closed = flush
        self.sent += len(answer.text.encode())
        return answer

    def _end(self, whole: str, answer: tokenizer_pb2.DecodedText, flush: bool) -> int:
        for index, stop in enumerate(self.opened.stop_sequences):
            if (at := whole.find(stop)) >= 0:
                self.stopped = True
                lengths = [len("".join(self.text_of(i) for i in self.ids[: n + 1]))
                           for n in range(len(self.ids))]  # fmt: skip
                token_index = next(
                    n for n, length in enumerate(lengths) if length >= at + len(stop)
                )
                answer.stop.CopyFrom(tokenizer_pb2.StopMatch(index=index, token_index=token_index))
                answer.num_ids = token_index + 1
                return at
        if flush:
            return len(whole)
        held = max(
            (n for stop in self.opened.stop_sequences for n in range(len(stop))
             if n and whole.endswith(stop[:n])), default=0
        )  # fmt: skip
        return len(whole) - held


class FakeTokenizer(FakeServer, tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Ids are code points of the last message's last text; an output id's text is in `pieces`,
    or the id itself with the canary.
    """

    def __init__(
        self, fingerprint: str = "vocabulary", model: str = "tokenizer-model", text: str = " "
    ) -> None:
        super().__init__()
        self.fingerprint = fingerprint
        self.model = model
        self.text = text
        self.max_piece_bytes = 0
        self.pieces: dict[int, str] = {}
        self.prompt_ids: list[int] | None = None
        self.encode_gate = asyncio.Event()
        self.encode_gate.set()
        self.decode_gate = asyncio.Event()
        self.decode_gate.set()
        self.encode_error: Exception | None = None
        self.encoded: list[tokenizer_pb2.EncodeChatRequest] = []
        self.traceparents: list[str] = []
        self.encode_us = 0
        self.decode_us = 0
        self.opened: list[tokenizer_pb2.DecodeOpen] = []
        self.slots: dict[int, Slot] = {}
        self._breaks: set[asyncio.Event] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, server)

    def text_of(self, token_id: int) -> str:
        return self.pieces.get(token_id, f"{self.text}{token_id}{CANARY}")

    def break_sessions(self) -> None:
        """End every decode session as a crash would."""
        for event in self._breaks:
            event.set()

    async def GetTokenizerInfo(self, request, context):  # noqa: N802
        return tokenizer_pb2.GetTokenizerInfoResponse(
            model=self.model,
            vocab_fingerprint=self.fingerprint,
            vocab_size=1000,
            max_piece_bytes=self.max_piece_bytes,
        )

    async def EncodeChat(self, request, context):  # noqa: N802
        self.encoded.append(request)
        self.traceparents.append(dict(context.invocation_metadata()).get("traceparent", ""))
        await self.encode_gate.wait()
        if self.encode_error is not None:
            await errors.abort(context, self.encode_error)
        ids = self.prompt_ids
        if ids is None:
            ids = [ord(c) for c in request.spec.messages[-1].content[-1].text.text]
        return tokenizer_pb2.EncodeChatResponse(prompt_token_ids=ids, duration_us=self.encode_us)

    async def Encode(self, request, context):  # noqa: N802
        self.encoded.append(request)
        self.traceparents.append(dict(context.invocation_metadata()).get("traceparent", ""))
        await self.encode_gate.wait()
        ids = [1] * request.add_special_tokens + [ord(c) for c in request.text]
        return tokenizer_pb2.EncodeResponse(token_ids=ids, duration_us=self.encode_us)

    async def DecodeSession(self, request_iterator, context):  # noqa: N802
        broken = asyncio.Event()
        self._breaks.add(broken)
        self.slots = {}
        # A status could not follow metadata that a first message is just taking along.
        await context.send_initial_metadata(())
        reading = asyncio.create_task(self._read(request_iterator, context))
        breaking = asyncio.create_task(broken.wait())
        try:
            await asyncio.wait({reading, breaking}, return_when=asyncio.FIRST_COMPLETED)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
        finally:
            self._breaks.discard(broken)
            reading.cancel()
            breaking.cancel()

    async def _read(self, requests, context) -> None:
        async for request in requests:
            await self.decode_gate.wait()
            texts = list(self._texts(request))
            for text in texts:
                text.duration_us = self.decode_us
            if texts:
                batch = tokenizer_pb2.DecodedBatch(texts=texts)
                await context.write(tokenizer_pb2.DecodeSessionResponse(batch=batch))

    def _texts(self, request):
        match request.WhichOneof("message"):
            case "open":
                self.opened.append(request.open)
                slot = self.slots[request.open.slot] = Slot(request.open, self.text_of)
                if slot.ids:
                    yield slot.news()
            case "batch":
                for delta in request.batch.deltas:
                    slot = self.slots.get(delta.slot)
                    if slot is not None and not slot.stopped:
                        slot.ids.extend(delta.token_ids)
                        answer = slot.news()
                        answer.pieces.extend(
                            self.text_of(i).encode() for i in delta.alternative_ids
                        )
                        yield answer
            case "close":
                slot = self.slots.pop(request.close.slot, None)
                if slot is not None and request.close.flush:
                    yield slot.news(flush=True)


class FakeWorker(FakeServer, worker_pb2_grpc.WorkerServiceServicer):
    """Does what a test says; with `auto` set it answers every submit with those ids at once."""

    def __init__(self, **hello: object) -> None:
        super().__init__()
        self.instances = 0
        self.hello = {
            "protocol_version": 1,
            "model": "fake-model",
            "vocab_fingerprint": "vocabulary",
            "max_model_len": 1000,
            "max_num_seqs": 4,
            "block_size": 16,
            "num_blocks": 1000,
            **hello,
        }
        self.auto: list[int] | None = None
        self.acknowledge_aborts = True
        self.submits: list[worker_pb2.Submit] = []
        self.aborts: list[int] = []
        self.aborted_choices: list[tuple[int, int]] = []
        self.live: dict[int, worker_pb2.Submit] = {}
        self._counts: dict[int, int] = {}
        self.last_submit_number = 0
        self.draining = False
        self._outbox: asyncio.Queue[worker_pb2.SessionResponse | None] = asyncio.Queue()

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def Session(self, request_iterator, context):  # noqa: N802
        self.instances += 1
        # One of its own: a session that is not over yet must not take what is another's.
        outbox = self._outbox = asyncio.Queue()
        self.live, self._counts, self.last_submit_number = {}, {}, 0
        hello = worker_pb2.WorkerHello(instance_id=f"instance-{self.instances}", **self.hello)
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            await context.write(worker_pb2.SessionResponse(hello=hello))
            self.say_load()
            while (message := await outbox.get()) is not None:
                await context.write(message)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
        finally:
            reading.cancel()

    async def _read(self, requests) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "submit":
                    self._submitted(request.submit)
                case "abort":
                    number = request.abort.submit_number
                    self.aborts.append(number)
                    if number in self.live and self.acknowledge_aborts:
                        self.finish(number, "aborted")
                case "abort_choice":
                    one = request.abort_choice
                    self.aborted_choices.append((one.submit_number, one.choice))

    def _submitted(self, submit: worker_pb2.Submit) -> None:
        self.submits.append(submit)
        self.live[submit.submit_number] = submit
        self.last_submit_number = submit.submit_number
        if self.auto is not None:
            for token_id in self.auto:
                self.emit(submit.submit_number, token_id)
            self.finish(submit.submit_number, "eos", EOS)

    def load(self, **changes: object) -> worker_pb2.Load:
        figures = {
            "last_submit_number": self.last_submit_number,
            "running": len(self.live),
            "free_blocks": 1000,
            "draining": self.draining,
            **changes,
        }
        return worker_pb2.Load(**figures)

    def say_load(self, **changes: object) -> None:
        self._outbox.put_nowait(worker_pb2.SessionResponse(load=self.load(**changes)))

    def break_session(self) -> None:
        """End the session as a crash would."""
        self._outbox.put_nowait(None)

    def emit(
        self, number: int, *token_ids: int, steps=(), cached: int | None = None, **more: object
    ) -> None:
        """One step that chose these ids for a choice; its first may tell its durations."""
        self._counts[number] = self._counts.get(number, 0) + len(token_ids)
        delta = worker_pb2.Delta(
            submit_number=number,
            token_ids=token_ids,
            steps=steps,
            cached_tokens=cached,
            **more,
        )
        self._step(deltas=[delta])

    def finish(
        self,
        number: int,
        reason: str,
        *token_ids: int,
        steps=(),
        more: int = 0,
        choice: int = 0,
        chosen=(),
        aborted=(),
        **report: int,
    ) -> None:
        """The step that ends a submit, with the last ids of one choice; `more` were computed
        unseen. All choices are said to have ended alike, but for the `aborted` ones.
        """
        others = self.live.pop(number).n - 1
        count = self._counts.pop(number, 0) + len(token_ids) + more
        finished = worker_pb2.Finished(
            finish_reasons=[
                FINISH["aborted" if i in aborted else reason] for i in range(1 + others)
            ],
            output_tokens=[count] + [0] * others,
            **report,
        )
        delta = worker_pb2.Delta(
            submit_number=number, choice=choice, token_ids=token_ids, steps=steps, chosen=chosen
        )
        self._step(
            deltas=[delta] if token_ids else [],
            terminals=[worker_pb2.Terminal(submit_number=number, finished=finished)],
        )

    def refuse(self, number: int, code: int, message: str = "", field: str = "") -> None:
        del self.live[number]
        refused = worker_pb2.Refused(code=code, message=message, field=field)
        terminal = worker_pb2.Terminal(submit_number=number, refused=refused)
        self._step(terminals=[terminal])

    def _step(self, **parts: object) -> None:
        step = worker_pb2.Step(load=self.load(), **parts)
        self._outbox.put_nowait(worker_pb2.SessionResponse(step=step))


class Setup:
    """A router with its fakes, and a client's stub."""

    def __init__(
        self,
        router: Router,
        tokenizer: FakeTokenizer,
        workers: list[FakeWorker],
        stub: chat_pb2_grpc.ChatServiceStub,
    ) -> None:
        self.router = router
        self.tokenizer = tokenizer
        self.workers = workers
        self.stub = stub

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0]

    def stream(self, text: str = "hi", *, key: str = KEY, timeout: float | None = 20, **fields):
        request = chat_pb2.StreamChatRequest(spec=spec(text, **fields))
        return self.stub.StreamChat(request, metadata=bearer(key), timeout=timeout)

    async def submitted(self, count: int, worker: int = 0) -> worker_pb2.Submit:
        """Wait until the worker has seen this many submits; the last of them."""
        fake = self.workers[worker]
        await until(lambda: len(fake.submits) >= count)
        return fake.submits[count - 1]

    async def holder(self) -> tuple[FakeWorker, FakeWorker]:
        """Wait until one of two workers has a submit: that one, then the other."""
        first, second = self.workers
        await until(lambda: first.submits or second.submits)
        return (first, second) if first.submits else (second, first)

    async def at_rest(self) -> None:
        """Wait until nothing is held; fail if something stays."""
        await until(lambda: not any(self.router.held().values()))


def bearer(key: str = KEY) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def spec(text: str = "hi", **fields: object) -> chat_pb2.ChatSpec:
    sampling = {k: fields.pop(k) for k in list(fields) if k in _SAMPLING}
    made = chat_pb2.ChatSpec(messages=[user(text)], **fields)
    if sampling:
        made.sampling.CopyFrom(common_pb2.SamplingParams(**sampling))
    return made


_SAMPLING = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}


def user(text: str) -> chat_pb2.Message:
    """The text, and a block before it of which no more should ever be heard."""
    blocks = [chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text=each)) for each in (CANARY, text)]
    return chat_pb2.Message(role=chat_pb2.ROLE_USER, content=blocks)


def told(text: str) -> str:
    """A text that was told, without the canary."""
    return text.replace(CANARY, "")


async def events(call) -> list[chat_pb2.StreamEvent]:
    """All events of a stream that is served."""
    received = []
    while (response := await call.read()) is not grpc.aio.EOF:
        received.append(response.event)
    return received


async def next_event(call) -> chat_pb2.StreamEvent:
    async with asyncio.timeout(5):
        response = await call.read()
    assert response is not grpc.aio.EOF
    return response.event


async def failure(call) -> tuple[grpc.StatusCode, RequestError | None]:
    """Status and error of a stream or call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(10):
            await (events(call) if hasattr(call, "read") else call)
    return caught.value.code(), refusal(caught.value)


def refusal(error: grpc.aio.AioRpcError) -> RequestError | None:
    """The RequestError that the status stands for; None if it says nothing."""
    raw = dict(error.trailing_metadata() or ()).get(errors.DETAILS_KEY)
    return None if raw is None else errors.parse_status_details(raw)


def kinds(answer: list[chat_pb2.StreamEvent]) -> list[str]:
    return [event.WhichOneof("event") for event in answer]


def texts(answer: list[chat_pb2.StreamEvent]) -> list[str]:
    """The texts of all text deltas, without the canary."""
    deltas = [e.content_block_delta for e in answer if e.HasField("content_block_delta")]
    return [told(delta.text) for delta in deltas if delta.WhichOneof("delta") == "text"]


@contextlib.asynccontextmanager
async def routed(
    *workers: FakeWorker,
    tokenizer: FakeTokenizer | None = None,
    more_tokenizers: Sequence[FakeTokenizer] = (),
    clock: Callable[[], float] = time.monotonic,
    seed: int = 7,
    ready: bool = True,
    **config: object,
) -> AsyncIterator[Setup]:
    """A router over loopback between fakes; everything must be at rest at the end."""
    tokenizer = tokenizer or FakeTokenizer()
    fakes = list(workers) or [FakeWorker()]
    tokenizers = (tokenizer, *more_tokenizers)
    for fake in (*tokenizers, *fakes):
        await fake.start()
    settings = RouterConfig(
        tokenizers=tuple(each.address for each in tokenizers),
        **{
            "workers": tuple(worker.address for worker in fakes),
            "listen": "127.0.0.1:0",
            "api_key_sha256": KEY_SHA256,
            "tick_s": 0.01,
            **config,
        },
    )
    try:
        async with running_router(settings, clock=clock, seed_source=lambda: seed) as router:
            if ready:
                await asyncio.wait_for(router.wait_ready(), 5)
                await until(lambda: sum(w.load is not None for w in router.registry) == len(fakes))
            async with grpc.aio.insecure_channel(router.address, SMALL_WINDOW) as channel:
                setup = Setup(router, tokenizer, fakes, chat_pb2_grpc.ChatServiceStub(channel))
                yield setup
                await setup.at_rest()
                look("metrics", generate_latest(router.metrics_registry).decode())
    finally:
        for fake in (*tokenizers, *fakes):
            await fake.stop()
