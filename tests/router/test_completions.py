"""A raw prompt has the same life as a chat, without a template."""

import grpc
import pytest

from noria.reasons import Reason, RequestError
from noria.service import limits
from noria.v1 import chat_pb2, common_pb2
from router.requests import RawIds, RawText
from router.validation import checked_completion
from tests.router.fakes import EOS, bearer, events, failure, kinds, routed, texts, told, until


def raw(text=None, ids=None, **fields) -> chat_pb2.CompletionSpec:
    spec = chat_pb2.CompletionSpec(**fields)
    if text is not None:
        spec.text = text
    if ids is not None:
        spec.token_ids.SetInParent()
        spec.token_ids.ids.extend(ids)
    return spec


def stream(setup, spec):
    request = chat_pb2.StreamCompletionRequest(spec=spec)
    return setup.stub.StreamCompletion(request, metadata=bearer(), timeout=20)


@pytest.mark.parametrize(
    ("add", "expected"), [(None, [1, 104, 105]), (True, [1, 104, 105]), (False, [104, 105])]
)
async def test_text_is_encoded_as_it_is(add, expected):
    async with routed() as setup:
        setup.worker.auto = [10]
        answer = await events(stream(setup, raw("hi", add_special_tokens=add)))
        assert list(setup.worker.submits[0].prompt_token_ids) == expected
        assert texts(answer) == [" 10"]
        assert kinds(answer)[0] == "message_start"
        assert kinds(answer)[-1] == "message_stop"


async def test_ids_go_to_the_worker_untouched_without_the_tokenizer():
    async with routed() as setup:
        setup.worker.auto = [10]
        request = chat_pb2.CompletionRequest(spec=raw(ids=[7, 0, 999], max_tokens=5))
        response = await setup.stub.Completion(request, metadata=bearer())
        (submit,) = setup.worker.submits
        assert (list(submit.prompt_token_ids), submit.max_tokens) == ([7, 0, 999], 5)
        assert not setup.tokenizer.encoded
        assert told(response.choices[0].content[0].text.text) == " 10"
        assert response.usage == response.timeline.usage
        assert response.usage == common_pb2.Usage(input_tokens=3, output_tokens=2)


async def test_an_id_beyond_the_vocabulary_is_refused_by_its_place():
    async with routed() as setup:
        code, error = await failure(stream(setup, raw(ids=[1, 1000, 4321])))
        assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD)
        assert error.fields == (("token_ids.ids[1]", "not below 1000"),)
        assert not setup.worker.submits


async def test_a_completion_can_be_cancelled_by_its_id():
    async with routed() as setup:
        call = stream(setup, raw("hi"))
        await setup.submitted(1)
        request_id = dict(await call.initial_metadata())["noria-request-id"]
        request = chat_pb2.CancelRequestRequest(request_id=request_id)
        await setup.stub.CancelRequest(request, metadata=bearer())
        assert (await failure(call))[1].reason is Reason.CANCELLED
        await until(lambda: setup.worker.aborts == [1])


async def test_a_stop_string_ends_a_completion():
    async with routed() as setup:
        setup.tokenizer.pieces = {10: "abSTOPcd"}
        call = stream(setup, raw("hi", stop_sequences=["STOP"]))
        await setup.submitted(1)
        setup.worker.emit(1, 10, 11)
        answer = await events(call)
        assert texts(answer) == ["ab"]
        (end,) = [e.message_delta for e in answer if e.HasField("message_delta")]
        assert (end.stop_sequence, end.usage.output_tokens) == ("STOP", 1)
        await until(lambda: EOS not in setup.worker.live and not setup.worker.live)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (raw(), "prompt"),
        (raw(""), "text"),
        (raw(ids=[]), "token_ids.ids"),
        (raw(ids=[1] * (limits.MAX_PROMPT_IDS + 1)), "token_ids.ids"),
        (raw("x", max_tokens=0), "max_tokens"),
        (raw("x", n=100), "n"),
        (raw("x", n=17), "n"),
        (raw("x", stop_sequences=[""]), "stop_sequences[0]"),
        (raw("x", sampling=common_pb2.SamplingParams(temperature=9)), "sampling.temperature"),
        (raw("x" * limits.MAX_CHAT_BYTES), "spec"),
    ],
)
def test_a_bad_field_is_refused_by_name(spec, field):
    with pytest.raises(RequestError) as caught:
        checked_completion(spec, 100)
    assert [name for name, _ in caught.value.fields] == [field]


def test_options_are_those_of_a_chat():
    checked = checked_completion(raw("x", priority=50, max_tokens=3), 10)
    assert (checked.priority, checked.max_tokens) == (10, 3)
    assert checked.prompt == RawText("x", add_special_tokens=True)
    assert checked_completion(raw(ids=[1, 2]), 10).prompt == RawIds((1, 2))
