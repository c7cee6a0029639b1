"""Several answers to one request, and what is told of their tokens."""

import grpc
import pytest

from noria.reasons import Reason
from noria.v1 import chat_pb2, common_pb2, worker_pb2
from tests.router.fakes import (
    EOS,
    FINISH,
    bearer,
    events,
    failure,
    kinds,
    routed,
    spec,
    texts,
    told,
    until,
)

SERVED_CHOICE = [
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
]


def of_choice(answer, choice):
    return [event for event in answer if event.choice == choice]


def end_of(answer, choice):
    (end,) = [e.message_delta for e in of_choice(answer, choice) if e.HasField("message_delta")]
    return end


async def test_each_choice_has_its_own_events_and_the_last_to_end_the_timeline():
    async with routed() as setup:
        call = setup.stream("hello", n=3)
        assert (await setup.submitted(1)).n == 3
        setup.worker.emit(1, 10, cached=4)
        setup.worker.emit(1, 20, choice=1)
        setup.worker.emit(1, 30, choice=2)
        setup.worker.emit(1, EOS, finish_reason=FINISH["eos"])
        setup.worker.emit(1, 31, choice=2)
        setup.worker.finish(1, "length", 21, choice=1)
        answer = await events(call)
        assert ["".join(texts(of_choice(answer, i))) for i in range(3)] == [
            " 10",
            " 20 21",
            " 30 31",
        ]
        for choice in range(3):
            seen = kinds(of_choice(answer, choice))
            assert list(dict.fromkeys(seen)) == SERVED_CHOICE
        usages = [end_of(answer, i).usage for i in range(3)]
        assert usages == [common_pb2.Usage(input_tokens=5, cached_tokens=4, output_tokens=2)] * 3
        assert end_of(answer, 0).stop_reason == chat_pb2.STOP_REASON_END_TURN
        assert end_of(answer, 1).stop_reason == chat_pb2.STOP_REASON_MAX_TOKENS
        ends = [e.message_delta for e in answer if e.HasField("message_delta")]
        assert [end.HasField("timeline") for end in ends] == [False, False, True]
        timeline = ends[-1].timeline
        whole = common_pb2.Usage(input_tokens=5, cached_tokens=4, output_tokens=6)
        assert (timeline.usage, timeline.wasted_tokens) == (whole, 0)
        assert sum(phase.duration_us for phase in timeline.phases) == timeline.total_us
        assert answer[-1].WhichOneof("event") == "message_stop"


async def test_a_choice_that_ends_early_is_told_at_once():
    async with routed() as setup:
        call = setup.stream(n=2)
        await setup.submitted(1)
        setup.worker.emit(1, 10, choice=1)
        setup.worker.emit(1, EOS, choice=1, finish_reason=FINISH["eos"])
        seen = []
        while not (seen and seen[-1].HasField("message_stop")):
            seen.append((await call.read()).event)
        assert seen[-1].choice == 1
        setup.worker.finish(1, "eos", EOS)
        assert kinds(of_choice(await events(call), 0))[-1] == "message_stop"


async def test_a_stop_string_ends_its_choice_alone_and_the_last_one_the_worker():
    async with routed() as setup:
        setup.tokenizer.pieces = {10: "STOP"}
        call = setup.stream(n=2, stop_sequences=["OPST"])
        await setup.submitted(1)
        setup.worker.emit(1, 10, 10)
        setup.worker.emit(1, 20, choice=1)
        received = []
        while not (received and received[-1].HasField("message_stop")):
            received.append((await call.read()).event)
        await until(lambda: setup.worker.aborted_choices == [(1, 0)])
        assert setup.worker.aborts == []
        setup.worker.emit(1, 10, 10, 10)
        setup.worker.emit(1, 10, 10, choice=1)
        answer = received + await events(call)
        assert ["".join(texts(of_choice(answer, i))) for i in range(2)] == ["ST", " 20ST"]
        assert {end_of(answer, i).stop_sequence for i in range(2)} == {"OPST"}
        assert [end_of(answer, i).usage.output_tokens for i in range(2)] == [2, 3]
        assert end_of(answer, 1).timeline.wasted_tokens == 3
        await until(lambda: setup.worker.aborts == [1])


async def test_a_choice_aborted_for_its_stop_string_is_no_loss():
    """The worker's last entry calls it aborted; the request is served all the same."""
    async with routed() as setup:
        setup.tokenizer.pieces = {10: "STOP"}
        call = setup.stream(n=3, stop_sequences=["OPST"])
        await setup.submitted(1)
        setup.worker.emit(1, 20)
        setup.worker.emit(1, 10, 10, 10, choice=1)
        await until(lambda: setup.worker.aborted_choices == [(1, 1)])
        setup.worker.emit(1, EOS, choice=2, finish_reason=FINISH["eos"])
        setup.worker.finish(1, "eos", EOS, aborted=[1])
        answer = await events(call)
        reasons = [end_of(answer, i).stop_reason for i in range(3)]
        assert reasons == [
            chat_pb2.STOP_REASON_END_TURN,
            chat_pb2.STOP_REASON_STOP_SEQUENCE,
            chat_pb2.STOP_REASON_END_TURN,
        ]
        assert "".join(texts(of_choice(answer, 1))) == "ST"
        assert setup.worker.aborted_choices == [(1, 1)]
        assert setup.worker.aborts == []


async def test_a_choice_that_a_worker_aborts_by_itself_is_a_loss():
    async with routed() as setup:
        call = setup.stream(n=2)
        await setup.submitted(1)
        setup.worker.emit(1, 10, choice=1)
        setup.worker.finish(1, "eos", EOS, aborted=[1])
        code, error = await failure(call)
        assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.WORKER_LOST)


async def test_chat_returns_all_choices_and_counts_the_prompt_once():
    async with routed() as setup:
        request = chat_pb2.ChatRequest(spec=spec("hey", n=2))
        call = setup.stub.Chat(request, metadata=bearer(), timeout=20)
        await setup.submitted(1)
        setup.worker.emit(1, 10)
        setup.worker.emit(1, 20, 21, choice=1)
        setup.worker.finish(1, "eos", EOS)
        response = await call
        texts = [told(choice.content[0].text.text) for choice in response.choices]
        assert texts == [" 10", " 20 21"]
        assert response.usage == common_pb2.Usage(input_tokens=3, output_tokens=4)
        assert [c.usage.output_tokens for c in response.choices] == [2, 2]
        assert response.timeline.usage == response.usage


@pytest.mark.parametrize("begun", [False, True])
async def test_a_lost_worker_moves_all_choices_or_fails_all(begun):
    async with routed() as setup:
        call = setup.stream(n=2)
        await setup.submitted(1)
        if begun:
            setup.worker.emit(1, 10, choice=1)
            while not (await call.read()).event.HasField("content_block_delta"):
                pass
        setup.worker.break_session()
        if begun:
            code, error = await failure(call)
            assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.WORKER_LOST)
        else:
            await setup.submitted(2)
            setup.worker.finish(1, "eos", EOS, choice=1)
            answer = await events(call)
            assert [kinds(of_choice(answer, i))[-1] for i in range(2)] == ["message_stop"] * 2


async def test_choices_take_places_in_the_room_that_is_left():
    """Four places: three choices, then a request of two must wait for the first to end."""
    async with routed() as setup:
        first = setup.stream(n=3)
        await setup.submitted(1)
        setup.worker.say_load(running=3)
        second, third = setup.stream(n=2), setup.stream(n=2)
        await setup.submitted(2)
        setup.worker.say_load(running=3, waiting=2)
        await until(lambda: setup.router.held()["permits"] == 1)
        assert len(setup.worker.submits) == 2
        for number, call in ((1, first), (2, second)):
            setup.worker.finish(number, "eos", EOS)
            await events(call)
        await setup.submitted(3)
        setup.worker.finish(3, "eos", EOS)
        await events(third)


def chosen(logprob, *alternatives):
    others = [common_pb2.TokenLogprob(id=i, logprob=share) for i, share in alternatives]
    return worker_pb2.ChosenToken(logprob=logprob, alternatives=others)


async def test_tokens_are_told_with_bytes_and_alternatives_the_ending_one_too():
    async with routed() as setup:
        setup.tokenizer.pieces = {10: "a", 11: "b", 12: "ㄷ", EOS: "<end>"}
        call = setup.stream(logprobs=2)
        assert (await setup.submitted(1)).sampling.logprobs == 2
        setup.worker.emit(1, 10, chosen=[chosen(-0.5, (11, -1.0), (12, -2.0))])
        setup.worker.finish(1, "eos", EOS, chosen=[chosen(-0.25, (10, -3.0))])
        answer = await events(call)
        tokens = [t for e in answer for t in e.content_block_delta.tokens]
        assert [(t.id, t.bytes, t.logprob) for t in tokens] == [
            (10, b"a", -0.5),
            (EOS, b"<end>", -0.25),
        ]
        told = [[(o.id, o.bytes, o.logprob) for o in t.alternatives] for t in tokens]
        assert told == [[(11, b"b", -1.0), (12, "ㄷ".encode(), -2.0)], [(10, b"a", -3.0)]]
        assert end_of(answer, 0).usage.output_tokens == len(tokens)
        assert "".join(texts(answer)) == "a"


async def test_tokens_beyond_a_stop_string_are_not_told():
    async with routed() as setup:
        setup.tokenizer.pieces = {10: "STOP"}
        call = setup.stream(logprobs=0, stop_sequences=["OPST"])
        await setup.submitted(1)
        setup.worker.emit(1, 10, 10, 10, chosen=[chosen(-1.0)] * 3)
        answer = await events(call)
        tokens = [t for e in answer for t in e.content_block_delta.tokens]
        assert len(tokens) == end_of(answer, 0).usage.output_tokens == 2


async def test_tokens_are_told_once_each_though_the_tokenizer_is_lost():
    async with routed() as setup:
        call = setup.stream(logprobs=1)
        await setup.submitted(1)
        setup.worker.emit(1, 10, chosen=[chosen(-1.0, (11, -2.0))])
        while not (first := (await call.read()).event).HasField("content_block_delta"):
            pass
        setup.tokenizer.decode_gate.clear()
        setup.worker.emit(1, 12, 13, chosen=[chosen(-3.0, (14, -4.0)), chosen(-5.0, (15, -6.0))])
        setup.tokenizer.break_sessions()
        await until(lambda: len(setup.tokenizer.opened) == 1)
        setup.tokenizer.decode_gate.set()
        setup.worker.finish(1, "eos", EOS, chosen=[chosen(-0.5)])
        answer = [first, *await events(call)]
        tokens = [t for e in answer for t in e.content_block_delta.tokens]
        assert [t.logprob for t in tokens] == [-1.0, -3.0, -5.0, -0.5]
        assert [told(t.bytes.decode()) for t in tokens[:3]] == [" 10", " 12", " 13"]
        assert "".join(texts(answer)) == " 10 12 13"


async def test_chat_tells_the_tokens_of_each_choice():
    async with routed() as setup:
        request = chat_pb2.ChatRequest(spec=spec("hey", n=2, logprobs=0))
        call = setup.stub.Chat(request, metadata=bearer(), timeout=20)
        await setup.submitted(1)
        setup.worker.emit(1, 10, chosen=[chosen(-1.0)])
        setup.worker.emit(1, 20, choice=1, chosen=[chosen(-2.0)])
        setup.worker.finish(1, "eos", EOS, choice=1, chosen=[chosen(-3.0)])
        response = await call
        shares = [[token.logprob for token in choice.tokens] for choice in response.choices]
        assert shares == [[-1.0], [-2.0, -3.0]]
