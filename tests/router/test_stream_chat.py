"""What a served stream looks like, event by event, over real gRPC between fakes."""

import grpc
import pytest

from noria.reasons import Reason
from noria.v1 import chat_pb2, common_pb2
from tests.router.fakes import (
    EOS,
    FakeTokenizer,
    FakeWorker,
    bearer,
    events,
    failure,
    kinds,
    next_event,
    refusal,
    routed,
    spec,
    texts,
    told,
    until,
)

EVENTS_AROUND = ["message_start", "content_block_start"]
EVENTS_AFTER = ["content_block_stop", "message_delta", "message_stop"]


def golden_tokenizer() -> FakeTokenizer:
    tokenizer = FakeTokenizer()
    tokenizer.prompt_ids = [
        5,
        21873,
        1240,
        6150,
        703,
        2981,
        13,
        6,
        7,
        7342,
        9180,
        412,
        1785,
        30,
        8,
        9,
    ]
    tokenizer.pieces = {4512: "네", 11: ",", 12: " 과일입니다."}
    return tokenizer


async def test_the_golden_answer_is_three_deltas_each_sent_at_once():
    """Each token's text goes out before the next token exists; EOS brings no text."""
    async with routed(tokenizer=golden_tokenizer()) as setup:
        call = setup.stream(max_tokens=984)
        submit = await setup.submitted(1)
        assert list(submit.prompt_token_ids) == setup.tokenizer.prompt_ids
        assert submit.sampling.temperature == 1.0
        start = await next_event(call)
        assert start.message_start.usage.input_tokens == 16
        received = []
        for token_id in (4512, 11, 12):
            setup.worker.emit(1, token_id)
            while not received or received[-1].WhichOneof("event") == "content_block_start":
                received.append(await next_event(call))
            assert received.pop().content_block_delta.text == setup.tokenizer.pieces[token_id]
        setup.worker.finish(1, "eos", EOS)
        rest = await events(call)
        assert kinds(rest) == EVENTS_AFTER
        assert rest[1].message_delta.stop_reason == chat_pb2.STOP_REASON_END_TURN


async def test_a_served_stream_begins_and_ends_as_promised():
    """STR-03: message_start, one text block, message_delta with usage, message_stop, OK."""
    async with routed() as setup:
        setup.worker.auto = [10, 11]
        call = setup.stream("hi")
        answer = await events(call)
        assert kinds(answer)[:2] == EVENTS_AROUND
        assert kinds(answer)[-3:] == EVENTS_AFTER
        assert set(kinds(answer)[2:-3]) == {"content_block_delta"}
        assert "".join(texts(answer)) == " 10 11"
        request_id = dict(await call.initial_metadata())["noria-request-id"]
        assert answer[0].message_start.request_id == request_id
        assert answer[0].message_start.model == "fake-model"
        assert all(event.choice == 0 for event in answer)
        assert await call.code() is grpc.StatusCode.OK


async def test_usage_counts_eos_and_what_the_prefix_cache_gave():
    async with routed() as setup:
        call = setup.stream("hello")
        await setup.submitted(1)
        setup.worker.emit(1, 10, cached=3)
        setup.worker.finish(1, "eos", EOS)
        usage = (await events(call))[-2].message_delta.usage
        assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (5, 3, 2)


async def test_an_empty_answer_has_an_empty_block_and_no_delta():
    """STP-09: EOS as the very first token: the block opens and closes, the tokenizer sees
    nothing.
    """
    async with routed() as setup:
        setup.worker.auto = []
        answer = await events(setup.stream())
        assert kinds(answer) == EVENTS_AROUND + EVENTS_AFTER
        assert answer[-2].message_delta.usage.output_tokens == 1
        assert not setup.tokenizer.opened


async def test_max_tokens_ends_with_its_own_stop_reason():
    """STP-10."""
    async with routed() as setup:
        call = setup.stream(max_tokens=2)
        assert (await setup.submitted(1)).max_tokens == 2
        setup.worker.emit(1, 10)
        setup.worker.finish(1, "length", 11)
        answer = await events(call)
        assert "".join(texts(answer)) == " 10 11"
        end = answer[-2].message_delta
        assert end.stop_reason == chat_pb2.STOP_REASON_MAX_TOKENS
        assert end.usage.output_tokens == 2


async def test_a_stop_string_ends_the_answer_and_the_worker():
    """STP-10: text before the match is sent, ids after it are neither sent nor counted."""
    async with routed() as setup:
        setup.tokenizer.pieces = {10: "STOP"}
        call = setup.stream(stop_sequences=["zzz", "OPST"])
        await setup.submitted(1)
        setup.worker.emit(1, 10)
        setup.worker.emit(1, 10)
        setup.worker.emit(1, 10)
        answer = await events(call)
        assert "".join(texts(answer)) == "ST"
        end = answer[-2].message_delta
        assert end.stop_reason == chat_pb2.STOP_REASON_STOP_SEQUENCE
        assert end.stop_sequence == "OPST"
        assert end.usage.output_tokens == 2
        await until(lambda: setup.worker.aborts == [1])


async def test_text_held_back_for_a_stop_string_comes_out_at_the_end():
    async with routed() as setup:
        setup.tokenizer.pieces = {10: "STOP"}
        call = setup.stream(stop_sequences=["STOPX"])
        await setup.submitted(1)
        setup.worker.emit(1, 10)
        setup.worker.finish(1, "length", 10)
        answer = await events(call)
        assert "".join(texts(answer)) == "STOPSTOP"
        assert not answer[-2].message_delta.HasField("stop_sequence")


@pytest.mark.parametrize("skip_special_tokens", [True, False])
async def test_the_text_of_a_stop_id_is_never_sent(skip_special_tokens):
    """STP-09."""
    async with routed() as setup:
        setup.tokenizer.pieces = {198: "LEAK"}
        call = setup.stream(stop_token_ids=[198], skip_special_tokens=skip_special_tokens)
        await setup.submitted(1)
        setup.worker.emit(1, 10)
        setup.worker.finish(1, "stop_id", 198)
        answer = await events(call)
        assert texts(answer) == [" 10"]
        end = answer[-2].message_delta
        assert end.stop_reason == chat_pb2.STOP_REASON_STOP_SEQUENCE
        assert not end.HasField("stop_sequence")
        assert end.usage.output_tokens == 2


async def test_step_records_ride_on_the_delta_with_their_tokens_text():
    """A chunk without a token goes with the first text, EOS's record in a delta of its own."""
    async with routed() as setup:
        call = setup.stream(trace_steps=True)
        assert (await setup.submitted(1)).trace_steps
        chunk = common_pb2.StepRecord(step=1, num_positions=8)
        first, second, last = (
            common_pb2.StepRecord(step=n, token_id=token_id)
            for n, token_id in ((2, 10), (3, 11), (4, EOS))
        )
        setup.worker.emit(1, steps=[chunk])
        setup.worker.emit(1, 10, steps=[first])
        received = [await next_event(call) for _ in range(3)]
        setup.worker.emit(1, 11, steps=[second])
        received.append(await next_event(call))
        setup.worker.finish(1, "eos", EOS, steps=[last])
        received += await events(call)
        deltas = [e.content_block_delta for e in received if e.HasField("content_block_delta")]
        assert [(told(d.text), [s.step for s in d.steps]) for d in deltas] == [
            (" 10", [1, 2]),
            (" 11", [3]),
            ("", [4]),
        ]
        assert deltas[-1].WhichOneof("delta") is None


async def test_chat_gives_the_same_answer_in_one_message():
    async with routed() as setup:
        setup.worker.auto = [10, 11]
        streamed = await events(setup.stream())
        whole = await setup.stub.Chat(chat_pb2.ChatRequest(spec=spec()), metadata=bearer())
        (choice,) = whole.choices
        assert told(choice.content[0].text.text) == "".join(texts(streamed))
        assert choice.usage == streamed[-2].message_delta.usage == whole.usage
        assert choice.stop_reason == chat_pb2.STOP_REASON_END_TURN
        assert whole.request_id.startswith("req-")


async def test_two_streams_never_mix():
    async with routed() as setup:
        first, second = setup.stream("a"), setup.stream("b")
        await setup.submitted(2)
        prompts = {s.submit_number: chr(s.prompt_token_ids[0]) for s in setup.worker.submits}
        ids = {"a": range(100, 110), "b": range(200, 210)}
        for position in range(10):
            for number, prompt in prompts.items():
                setup.worker.emit(number, ids[prompt][position])
        for number in prompts:
            setup.worker.finish(number, "eos", EOS)
        for prompt, call in (("a", first), ("b", second)):
            expected = "".join(f" {i}" for i in ids[prompt])
            assert "".join(texts(await events(call))) == expected


async def test_what_the_worker_is_asked_for_is_what_the_client_asked_for():
    """GRP-08: sampling, seed, priority and milliseconds left cross unchanged; absent ones get
    defaults.
    """
    async with routed(FakeWorker(default_max_tokens=64), seed=41) as setup:
        setup.worker.auto = []
        asked = {"temperature": 0.5, "top_p": 0.25, "top_k": 5, "min_tokens": 3, "seed": -1}
        asked |= {"stop_token_ids": [9], "ignore_eos": True, "priority": 4}
        await events(setup.stream(**asked, timeout=30))
        submit = await setup.submitted(1)
        sampling = submit.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 5)
        assert (sampling.min_tokens, sampling.seed, sampling.ignore_eos) == (3, -1, True)
        assert list(sampling.stop_token_ids) == [9]
        assert submit.priority == 4
        assert submit.max_tokens == 64
        assert 25_000 < submit.deadline_ms < 31_000
        await events(setup.stream(timeout=None))
        plain = await setup.submitted(2)
        assert (plain.sampling.seed, plain.priority) == (41, 0)
        assert 590_000 < plain.deadline_ms <= 600_000


@pytest.mark.parametrize(
    ("default", "asked", "expected"),
    [(0, None, 990), (64, None, 64), (5000, None, 990), (64, 990, 990)],
)
async def test_max_tokens_defaults_to_the_models_and_never_exceeds_the_room(
    default, asked, expected
):
    async with routed(FakeWorker(default_max_tokens=default, max_model_len=1000)) as setup:
        setup.worker.auto = []
        await events(setup.stream("x" * 10, **({"max_tokens": asked} if asked else {})))
        assert (await setup.submitted(1)).max_tokens == expected


@pytest.mark.parametrize(("prompt", "asked"), [(10, 991), (1000, 1), (1000, None), (2000, None)])
async def test_a_request_beyond_the_context_is_refused_naming_both_numbers(prompt, asked):
    async with routed() as setup:
        call = setup.stream("x" * prompt, **({"max_tokens": asked} if asked else {}))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await events(call)
        error = refusal(caught.value)
        assert error.reason is Reason.CONTEXT_LENGTH_EXCEEDED
        assert str(prompt) in error.message
        assert "1000" in error.message
        assert error.fields[0][0] == "max_tokens"
        assert not setup.worker.submits


async def test_more_required_output_than_the_default_allows_is_refused_before_any_worker():
    async with routed(FakeWorker(default_max_tokens=5)) as setup:
        code, error = await failure(setup.stream(min_tokens=6))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        (violation,) = error.fields
        assert violation == ("sampling.min_tokens", "6; at most max_tokens, which is 5")
        assert not setup.worker.submits
