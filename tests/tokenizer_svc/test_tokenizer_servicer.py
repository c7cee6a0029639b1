"""The tokenizer service over real gRPC on loopback."""

import asyncio
import contextlib

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2, status_pb2

from noria.reasons import RequestError
from noria.service import limits
from noria.service.errors import DETAILS_KEY
from noria.v1 import chat_pb2, tokenizer_pb2
from tests.support.tokenizer_client import chat_spec, decode_client, encode_chat, tokenizer_stub
from tests.support.vocabularies import vocabulary_of
from tokenizer_svc import decode_session, servicer
from tokenizer_svc.app import running_tokenizer
from tokenizer_svc.config import TokenizerConfig
from tokenizer_svc.decode_session import IDS_PER_TURN, serve_session
from tokenizer_svc.decode_slot import SlotOptions
from tokenizer_svc.decode_slots import DecodeSlots

GOLDEN_IDS = [5, 21873, 1240, 6150, 703, 2981, 13, 6, 7, 7342, 9180, 412, 1785, 30, 8, 9]
YES, COMMA, FRUIT, EOS = 4512, 11, 15339, 2
EMOJI_HALF = [172, 253]  # the bytes f0 9f


@contextlib.asynccontextmanager
async def serving(path, **settings):
    failures = []
    config = TokenizerConfig(path, "golden", "127.0.0.1:0", **settings)
    async with running_tokenizer(config, on_failure=failures.append) as tokenizer:
        await tokenizer.ready()
        async with tokenizer_stub(tokenizer.address) as stub:
            yield stub
    assert failures == []


@pytest.fixture
async def stub(golden_model):
    async with serving(golden_model) as stub:
        yield stub


def reason_of(error):
    """The reason and the fields in an error's details."""
    trailing = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailing[DETAILS_KEY])
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(request)
    return info.reason, [violation.field for violation in request.field_violations]


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), *reason_of(caught.value)


async def test_the_golden_conversation_over_the_wire(stub):
    """Ids in, and the texts of the answer's ids out, EOS without text but accounted for."""
    question = ("user", "토마토는 과일이야?")
    assert await encode_chat(stub, question, system="짧게 답하세요.") == GOLDEN_IDS
    async with decode_client(stub) as session:
        await session.open(1, model="golden", prompt_tail_ids=GOLDEN_IDS[-4:])
        for i, token_id in enumerate((YES, COMMA, FRUIT, EOS), start=1):
            await session.feed(1, token_id)
            await session.until(lambda i=i: len(session.texts.get(1, [])) == i)
        await session.close(1)
        assert (await session.closed(1)).num_ids == 4
    told = [(text.text, text.byte_offset, text.num_ids) for text in session.texts[1][:-1]]
    assert told == [("네", 0, 1), (",", 3, 2), (" 과일입니다.", 4, 3), ("", 21, 4)]
    assert {text.kind for text in session.texts[1]} == {tokenizer_pb2.BLOCK_KIND_TEXT}


async def test_info_tells_what_is_loaded(stub):
    """Name, both fingerprints, size and EOS ids."""
    info = await stub.GetTokenizerInfo(tokenizer_pb2.GetTokenizerInfoRequest())
    assert (info.model, info.vocab_size, list(info.eos_token_ids)) == ("golden", 21880, [EOS])
    assert len(info.vocab_fingerprint) == len(info.template_fingerprint) == 64


async def test_raw_text_and_single_ids(stub):
    """`Encode` and `Decode` are each other's inverse."""
    request = tokenizer_pb2.EncodeRequest(text="네, 과일입니다. 😀", add_special_tokens=True)
    ids = (await stub.Encode(request)).token_ids
    pieces = (await stub.Decode(tokenizer_pb2.DecodeRequest(token_ids=ids))).pieces
    assert b"".join(pieces).decode() == request.text


@pytest.mark.parametrize("token_id", [21880, 2**31, 2**32 - 1])
async def test_unknown_ids_fail_their_own_call_alone(stub, token_id):
    """DET-05: INVALID_ARGUMENT; a session beside it goes on."""
    async with decode_client(stub) as session:
        await session.open(1)
        await session.feed(1, YES)
        request = tokenizer_pb2.DecodeRequest(token_ids=[YES, token_id])
        status = grpc.StatusCode.INVALID_ARGUMENT
        assert await refused(stub.Decode(request)) == (status, "INVALID_FIELD", ["token_ids[1]"])
        await session.feed(1, FRUIT)
        await session.until(lambda: session.text(1) == "네 과일입니다.")


async def test_a_million_ids_in_one_call(stub):
    """At the limit they are decoded, beyond it refused."""
    ids = [YES] * limits.MAX_DECODE_IDS
    assert len((await stub.Decode(tokenizer_pb2.DecodeRequest(token_ids=ids))).pieces) == len(ids)
    request = tokenizer_pb2.DecodeRequest(token_ids=[*ids, YES])
    assert (await refused(stub.Decode(request)))[1] == "INVALID_FIELD"


async def test_a_slot_with_an_unknown_id_fails_alone(stub):
    """DET-05 in a session: that slot is closed with the error, the others go on."""
    async with decode_client(stub) as session:
        await session.open(1)
        await session.open(2)
        await session.feed(1, 2**31)
        assert "token_ids: not below 2" in (await session.closed(1)).error
        await session.feed(2, YES)
        await session.close(2)
        await session.closed(2)
        assert session.text(2) == "네"


async def test_unknown_models_are_not_found(stub):
    """In calls by status, in a session for the slot alone."""
    for call in (
        stub.EncodeChat(tokenizer_pb2.EncodeChatRequest(spec=chat_spec("x", model="other"))),
        stub.Encode(tokenizer_pb2.EncodeRequest(model="other")),
        stub.Decode(tokenizer_pb2.DecodeRequest(model="other")),
        stub.GetTokenizerInfo(tokenizer_pb2.GetTokenizerInfoRequest(model="other")),
    ):
        status = grpc.StatusCode.NOT_FOUND
        assert await refused(call) == (status, "MODEL_NOT_FOUND", [])
    async with decode_client(stub) as session:
        await session.open(1, model="other")
        assert "not served here; 'golden' is" in (await session.closed(1)).error


@pytest.mark.parametrize(
    ("name", "reason"), [("x" * 256, "MODEL_NOT_FOUND"), ("x" * 1_000_000, "INVALID_FIELD")]
)
async def test_a_models_name_is_not_repeated(stub, name, reason):
    """An error beyond the size of metadata would reach nobody, and a name could be anything."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Encode(tokenizer_pb2.EncodeRequest(model=name))
    assert reason_of(caught.value)[0] == reason
    assert "xx" not in caught.value.details()


@pytest.mark.parametrize("content", ["", " ", "\n\t "])
async def test_empty_and_blank_texts_are_encoded(stub, content):
    """TOK-06: they are texts; a message without any block is not."""
    ids = await encode_chat(stub, content, system=content)
    assert [i for i in ids if i in (5, 6, 7, 8, 9)] == [5, 6, 7, 8, 9]
    spec = chat_pb2.ChatSpec(messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER)])
    status = grpc.StatusCode.INVALID_ARGUMENT
    call = stub.EncodeChat(tokenizer_pb2.EncodeChatRequest(spec=spec))
    assert await refused(call) == (status, "INVALID_FIELD", ["messages[0].content"])


async def test_oversize_text_is_refused_before_it_is_encoded(stub):
    """TOK-08: with both numbers, whatever the text; the message as such may be larger."""
    for text in ("a" * 5_000_000, " " * 5_000_000, "\u0301" * 2_500_000):
        for call in (
            stub.EncodeChat(tokenizer_pb2.EncodeChatRequest(spec=chat_spec(text))),
            stub.Encode(tokenizer_pb2.EncodeRequest(text=text)),
        ):
            assert (await refused(call))[:2] == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "MESSAGE_TOO_LARGE",
            )


async def test_a_long_text_holds_nobody_up(stub):
    """TOK-08: while a text at the limit is encoded, short calls and streams are answered."""
    long = asyncio.create_task(encode_chat(stub, "<|" * (limits.MAX_CHAT_BYTES // 2)))
    async with decode_client(stub) as session:
        await session.open(1)
        answered = 0
        while not long.done():
            assert await encode_chat(stub, "x") == [7, 87, 8, 9]
            await session.feed(1, YES)
            answered += 1
            await session.until(lambda n=answered: session.text(1) == "네" * n)
        assert len(await long) == limits.MAX_CHAT_BYTES + 3
    assert answered > 3


async def test_pieces_come_with_the_text(stub):
    """One per id of the delta, then one per alternative."""
    async with decode_client(stub) as session:
        await session.open(1)
        await session.feed(1, *EMOJI_HALF, want_pieces=True, alternative_ids=[YES])
        await session.until(lambda: session.texts.get(1))
        (text,) = session.texts[1]
        assert (text.text, list(text.pieces)) == ("", [b"\xf0", b"\x9f", "네".encode()])


async def test_reopened_slots_replay_their_ids(stub):
    """A long output too, in one go, and the byte offsets go on from there."""
    ids = [YES, COMMA] * (IDS_PER_TURN + 10)
    async with decode_client(stub) as session:
        await session.open(1, output_token_ids=ids, stop_sequences=[",." * 10])
        await session.feed(1, FRUIT)
        await session.close(1)
        assert (await session.closed(1)).num_ids == len(ids) + 1
    assert session.text(1) == "네," * (len(ids) // 2) + " 과일입니다."
    offset = 0
    for text in session.texts[1]:
        assert text.byte_offset == offset
        offset += len(text.text.encode())


async def test_stop_strings_over_the_wire(stub):
    """The verdict names the string and the id; bad ones fail the slot with their field."""
    async with decode_client(stub) as session:
        await session.open(1, stop_sequences=["x", "일입"], min_tokens=2)
        await session.feed(1, FRUIT, YES, FRUIT, COMMA)
        await session.until(lambda: session.texts.get(1))
        stop = session.texts[1][0].stop
        assert (session.text(1), stop.index, stop.token_index) == (" 과일입니다.네 과", 1, 2)
        assert session.texts[1][0].num_ids == 3
        await session.open(2, stop_sequences=["ok", ""])
        assert "stop_sequences[1]: 0 bytes" in (await session.closed(2)).error


async def test_a_session_ends_when_the_router_ends_its_side(stub):
    """What waits is still sent; then the call ends well."""
    call = stub.DecodeSession()
    opened = tokenizer_pb2.DecodeOpen(slot=1, output_token_ids=[YES])
    await call.write(tokenizer_pb2.DecodeSessionRequest(open=opened))
    await call.done_writing()
    assert [r.batch.texts[0].text async for r in call] == ["네"]
    assert await call.code() == grpc.StatusCode.OK


async def test_a_reader_that_stalls_loses_its_session(monkeypatch):
    """A router that has read nothing for too long, also one that sends nothing more."""
    monkeypatch.setattr(decode_session, "_WATCH_S", 0.01)
    now, blocked = [0.0], asyncio.Event()
    slots = DecodeSlots(vocabulary_of("a"), clock=lambda: now[0])

    async def requests():
        for at in (0.0, 1.0):
            now[0] = at
            await asyncio.sleep(0)
            feed = tokenizer_pb2.DecodeDelta(slot=1, token_ids=[0])
            yield tokenizer_pb2.DecodeSessionRequest(batch=tokenizer_pb2.DecodeBatch(deltas=[feed]))
        now[0] = 12.0
        await blocked.wait()

    async def write(_):
        await blocked.wait()

    slots.open(1, SlotOptions())
    with pytest.raises(RequestError, match=r"waited for 1[12] s"):
        await serve_session(
            requests(), write, slots, None, on_ids=lambda ids: None, clock=lambda: now[0]
        )


async def test_a_request_cannot_bring_a_template(stub):
    """SEC-04: no field holds one, and content that looks like one stays content."""
    fields = {field.name for field in chat_pb2.ChatSpec.DESCRIPTOR.fields}
    assert not {name for name in fields if "template" in name or "kwargs" in name}
    ids = await encode_chat(stub, "{{ 7*7 }}")
    pieces = (await stub.Decode(tokenizer_pb2.DecodeRequest(token_ids=ids))).pieces
    assert b"".join(pieces) == b"<|user|>{{ 7*7 }}<|/user|><|assistant|>"


async def test_bytes_that_are_no_message_end_their_session_with_a_reason(golden_model):
    """Not with an exception's name; the slots are gone, and another session decodes."""
    config = TokenizerConfig(golden_model, "golden", "127.0.0.1:0")
    async with running_tokenizer(config) as tokenizer:
        await tokenizer.ready()
        async with grpc.aio.insecure_channel(tokenizer.address) as channel:
            call = channel.stream_stream("/noria.v1.TokenizerService/DecodeSession")()
            opened = tokenizer_pb2.DecodeOpen(slot=1)
            message = tokenizer_pb2.DecodeSessionRequest(open=opened)
            await call.write(message.SerializeToString())
            await call.write(b"\xff" * 100)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await to_its_end(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "no message of this method" in caught.value.details()
        async with tokenizer_stub(tokenizer.address) as stub, decode_client(stub) as session:
            await session.open(1)
            await session.close(1)
            assert (await session.closed(1)).num_ids == 0


async def to_its_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_defect_is_told_with_the_callers_trace(golden_model, monkeypatch):
    """And without what the exception says."""
    told = []

    def fail(error):
        told.append(structlog.contextvars.get_contextvars())

    def broken(request):
        raise RuntimeError

    monkeypatch.setattr(servicer, "chat_messages", broken)
    config = TokenizerConfig(golden_model, "golden", "127.0.0.1:0")
    async with running_tokenizer(config, on_failure=fail) as tokenizer:
        await tokenizer.ready()
        async with tokenizer_stub(tokenizer.address) as stub:
            metadata = (("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),)
            code, reason, _ = await refused(
                stub.EncodeChat(tokenizer_pb2.EncodeChatRequest(), metadata=metadata)
            )
    assert (code, reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert told == [{"trace_id": "a" * 32}]
