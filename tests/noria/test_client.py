"""The synchronous client against a service on loopback."""

import socket
import threading

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import status_pb2
from google.rpc.error_details_pb2 import RetryInfo

import noria
from noria import Client
from noria.client.connection import find_api_key
from noria.client.decode import TIMELINE_KEY
from noria.client.errors import ERROR_OF
from noria.reasons import Reason, RequestError
from noria.service.errors import DETAILS_KEY
from noria.v1 import chat_pb2, common_pb2
from tests.noria.fake_chat import REQUEST_ID, answer_events, refuse, text_event


@pytest.fixture
def client(chat_service):
    with Client(chat_service.address, api_key="k", timeout=20, retry=False) as client:
        yield client


def test_pieces_come_as_they_are_sent_and_the_result_tells_the_whole(client):
    with client.stream_chat("q") as stream:
        assert stream.request_id == REQUEST_ID
        assert list(stream) == ["Yes", ",", " it is."]
        result = stream.result
    assert result.text == "Yes, it is."
    assert (result.stop_reason, result.stop_sequence) == ("end_turn", None)
    assert result.usage == noria.Usage(input_tokens=7, cached_tokens=2, output_tokens=4)
    assert (result.request_id, result.model) == (REQUEST_ID, "fake")
    assert result.timeline.total_us == 5


def test_chat_gives_what_the_stream_gives(client):
    with client.stream_chat("q") as stream:
        list(stream)
    assert client.chat("q") == stream.result


def test_a_piece_is_there_before_the_next_one_is_made(chat_service, client):
    gate = threading.Event()

    def events(_spec, _context):
        yield text_event("a")
        assert gate.wait(20)
        yield from answer_events("b")

    chat_service.events = events
    with client.stream_chat("q") as stream:
        pieces = iter(stream)
        assert next(pieces) == "a"
        gate.set()
        assert list(pieces) == ["b"]


def test_events_are_the_raw_ones_and_other_choices_are_not_the_answer(chat_service, client):
    chat_service.events = lambda *_: [text_event("other", choice=1), *answer_events("a")]
    with client.stream_chat("q") as stream:
        kinds = [event.WhichOneof("event") for event in stream.events()]
    assert kinds[0] == "content_block_delta"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert stream.result.text == "a"


def test_a_stream_with_several_answers_ends_when_each_has(chat_service, client):
    """The first one's text is the answer; usage counts the outputs of all, the prompt once."""

    def events(_spec, _context):
        both = [list(answer_events("a")), list(answer_events("b"))]
        for choice, answer in enumerate(both):
            for event in answer:
                event.choice = choice
        yield both[0][0]
        yield both[1][0]
        yield from both[0][1:]
        yield from both[1][1:]

    chat_service.events = events
    with client.stream_chat("q", n=2) as stream:
        assert list(stream) == ["a"]
    result = stream.result
    assert [choice.text for choice in result.choices] == ["a", "b"]
    assert result.usage == noria.Usage(input_tokens=7, cached_tokens=2, output_tokens=4)


def test_a_stream_that_lacks_an_answers_end_is_an_error(chat_service, client):
    second = chat_pb2.StreamEvent(choice=1, message_start=chat_pb2.MessageStart())
    chat_service.events = lambda *_: [second, *answer_events("a")]
    with (
        client.stream_chat("q", n=2) as stream,
        pytest.raises(noria.NoriaError, match="without message_stop"),
    ):
        list(stream)


def test_a_stop_sequence_is_named(chat_service, client):
    chat_service.events = lambda *_: answer_events("a", stop_sequence="END")
    with client.stream_chat("q") as stream:
        list(stream)
    assert (stream.result.stop_reason, stream.result.stop_sequence) == ("stop_sequence", "END")


def test_leaving_the_block_early_cancels_the_call(chat_service, client):
    chat_service.hold("a")
    with client.stream_chat("q") as stream:
        next(iter(stream))
    assert chat_service.ended.wait(20)


def test_cancel_ends_the_stream_for_its_reader(chat_service, client):
    chat_service.hold("a")
    with client.stream_chat("q") as stream:
        pieces = iter(stream)
        next(pieces)
        stream.cancel()
        with pytest.raises(noria.RequestCancelledError) as caught:
            next(pieces)
    assert caught.value.request_id == REQUEST_ID
    assert chat_service.ended.wait(20)


def test_cancel_by_id_names_the_request(chat_service, client):
    client.cancel("req-9")
    assert chat_service.cancelled_ids == ["req-9"]


def test_a_result_asked_too_early_and_a_stream_not_opened_are_refused(chat_service, client):
    chat_service.hold("a")
    with pytest.raises(RuntimeError, match="with client"):
        next(iter(client.stream_chat("q")))
    with client.stream_chat("q") as stream, pytest.raises(RuntimeError, match="not ended"):
        _ = stream.result


def test_a_stream_that_ends_without_message_stop_is_an_error(chat_service, client):
    chat_service.events = lambda *_: [text_event("a")]
    with client.stream_chat("q") as stream, pytest.raises(noria.NoriaError, match="message_stop"):
        list(stream)


def test_a_deadline_is_sent_by_default_and_a_call_may_name_its_own(chat_service, client):
    client.chat("q")
    client.chat("q", timeout=5)
    assert 15 < chat_service.deadlines[0] < 21
    assert chat_service.deadlines[1] < 6


def test_a_trace_context_is_sent_with_the_call_that_names_it(chat_service, client):
    context = f"00-{'a' * 32}-{'b' * 16}-01"
    client.chat("q", traceparent=context)
    with client.stream_chat("q", traceparent=context) as stream:
        list(stream)
    client.chat("q")
    sent = [dict(metadata).get("traceparent") for metadata in chat_service.metadata]
    assert sent == [context, context, None]


def test_a_deadline_that_passes_is_a_typed_error(chat_service, client):
    chat_service.hold("a")
    stream = client.stream_chat("q", timeout=0.3)
    with stream, pytest.raises(noria.DeadlineExceededError) as caught:
        list(stream)
    assert caught.value.request_id == REQUEST_ID
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_is_raised_as_its_class_with_all_it_says(chat_service, client, reason):
    error = RequestError(reason, "why", fields=(("top_p", "too big"),), retry_after_s=2.5)
    chat_service.events = lambda _spec, context: refuse(context, error)
    with client.stream_chat("q") as stream, pytest.raises(ERROR_OF[reason]) as caught:
        list(stream)
    with pytest.raises(ERROR_OF[reason]) as unary:
        client.chat("q")
    for raised in (caught.value, unary.value):
        assert raised.reason is reason
        assert (raised.message, raised.request_id) == ("why", REQUEST_ID)
        assert raised.fields == (("top_p", "too big"),)
        assert raised.retry_after_s == 2.5
        assert REQUEST_ID in str(raised)
        assert reason.value in str(raised)


def test_details_that_cannot_be_read_leave_the_plain_status(chat_service, client):
    def events(_spec, context):
        context.set_trailing_metadata(((DETAILS_KEY, b"\xff\xff\xff"),))
        context.abort(grpc.StatusCode.INTERNAL, "broken")

    chat_service.events = events
    with pytest.raises(noria.NoriaError, match="broken") as caught:
        client.chat("q")
    assert caught.value.reason is None


def test_an_error_carries_the_timeline_that_came_with_it(chat_service, client):
    told = common_pb2.Timeline(request_id=REQUEST_ID, total_us=7)

    def events(sent):
        def refused(_spec, context):
            context.set_trailing_metadata(((TIMELINE_KEY, sent),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

        return refused

    for sent, expected in ((told.SerializeToString(), told), (b"\xff\xff", None), (b"", None)):
        chat_service.events = events(sent)
        with pytest.raises(noria.NoriaError) as caught:
            client.chat("q")
        assert caught.value.timeline == expected


def test_a_delay_beyond_all_bounds_counts_as_none(chat_service, client):
    status = status_pb2.Status(code=8)
    status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=2**62)))

    def events(_spec, context):
        context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "later")

    chat_service.events = events
    with pytest.raises(noria.NoriaError, match="later") as caught:
        client.chat("q")
    assert caught.value.retry_after_s is None


def test_nobody_at_the_address_is_said_as_such():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with Client(address, timeout=20) as client:
            with pytest.raises(noria.UnreachableError):
                client.chat("q")
            with client.stream_chat("q") as stream, pytest.raises(noria.UnreachableError):
                list(stream)


def test_the_key_comes_from_the_argument_then_the_environment_then_the_file(
    chat_service, monkeypatch, tmp_path
):
    def seen(**arguments):
        with Client(chat_service.address, **arguments) as client:
            client.chat("q")
        return chat_service.metadata[-1].get("authorization")

    assert seen() is None
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "api-key").write_text("from-file\n")
    assert seen() == "Bearer from-file"
    monkeypatch.setenv("NORIA_API_KEY", "from-env")
    assert seen() == "Bearer from-env"
    assert seen(api_key="given") == "Bearer given"


@pytest.mark.parametrize(
    "address",
    ["localhost:1", "127.0.0.1:1", "[::1]:1", "dns:///localhost:1", "ipv4:127.0.0.1:1,127.1.0.1:2"],
)
def test_the_files_key_is_for_this_computer(key_of_up, address):
    assert find_api_key(None, address) == key_of_up


@pytest.mark.parametrize(
    "address",
    ["gpu-7:1", "10.0.0.1:1", "127.example.com:1", "localhost.example.com:1", "[::2]:1",
     "dns:///127.example.com:1", "dns://10.0.0.1/localhost:1", "ipv4:127.0.0.1:1,10.0.0.1:1"],
)  # fmt: skip
def test_the_files_key_goes_nowhere_else(key_of_up, monkeypatch, address):
    """It would cross a network in plain text; a key that is given goes wherever it is meant to."""
    assert find_api_key(None, address) is None
    assert find_api_key("given", address) == "given"
    monkeypatch.setenv("NORIA_API_KEY", "from-env")
    assert find_api_key(None, address) == "from-env"


def test_a_blank_key_counts_as_none(key_of_up, monkeypatch):
    monkeypatch.setenv("NORIA_API_KEY", " ")
    assert find_api_key(" ", "localhost:1") == key_of_up
    assert find_api_key(" ", "gpu-7:1") is None


@pytest.fixture
def key_of_up(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "api-key").write_text("from-file\n")
    return "from-file"


@pytest.mark.parametrize("key", ["café", "a b", "a\nb"])
def test_a_key_that_no_header_carries_is_refused_without_repeating_it(key):
    with pytest.raises(ValueError, match="api_key") as caught:
        Client(api_key=key)
    assert key not in str(caught.value)


@pytest.mark.parametrize("address", ["", "localhost", "localhost:http"])
def test_an_address_without_a_port_is_refused(address):
    with pytest.raises(ValueError, match="address"):
        Client(address)


def test_a_dns_target_is_taken_as_it_is(chat_service):
    with Client(f"dns:///{chat_service.address}") as client:
        assert client.chat("q").text == "Yes, it is."
